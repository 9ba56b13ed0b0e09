"""Training that goes on when members die: python examples/torchft_ddp.py --members 3 --kill

Each member is a process of its own, and no launcher ties them together. They meet at a lighthouse. With --kill the
second member is killed amid the run and started again. The others go on, and it heals from one of them.
"""

import argparse
import hashlib
import logging
import multiprocessing
import os
import signal
import time
import warnings

import torch
from torch import nn

from oktopk import OkTopk
from oktopk.integrations.torchft import attach
from oktopk.integrations.torchft.start import Lighthouse, Patience, make_manager

HERE = "127.0.0.1"
PATIENCE = Patience(collective_s=5.0, heartbeat_s=2.0, quorum_s=30.0)


def train(lighthouse: str, number: int, steps: int, members: int, dies_at: int) -> None:
    logging.disable(logging.WARNING)  # torchft says much
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    # In a script of yours this may be any torchft.Manager with use_async_quorum=False.
    manager, close = make_manager(lighthouse, HERE, name=f"member{number}", min_members=1, patience=PATIENCE)
    net = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 10))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)
    member = attach(net, optimizer, OkTopk(), manager=manager, dense_steps=20)
    size = 0
    while member.step_number < steps or member.size < members:  # alike on all: they have the same step and size
        member.zero_grad()  # joins a quorum; a member that is behind gets weights, optimizer and step from another
        samples = torch.Generator().manual_seed(1000 * member.step_number + member.rank)
        x = torch.randn(64, 64, generator=samples)
        loss = nn.functional.cross_entropy(net(x), x[:, :10].argmax(dim=1))
        loss.backward()
        if member.step_number == dies_at:
            os.kill(os.getpid(), signal.SIGKILL)
        if not member.step():  # a member died: nothing has changed, make the same batch again
            print(f"member {number}: step {member.step_number} is not committed", flush=True)
            continue
        if member.size != size:
            size = member.size
            print(f"member {number}: step {member.step_number}, {size} members, loss {loss:.3f}", flush=True)
        time.sleep(0.02)
    weights = b"".join(each.detach().numpy().tobytes() for each in net.parameters())
    print(f"member {number}: weights {hashlib.sha256(weights).hexdigest()[:16]}, loss {loss:.3f}", flush=True)
    member.detach()
    close()


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--members", type=int, default=3)
    parser.add_argument("--steps", type=int, default=160)
    parser.add_argument("--kill", action="store_true", help="kill the second member amid the run, and start it again")
    args = parser.parse_args()
    os.environ.setdefault("RUST_LOG", "error")
    lighthouse = Lighthouse(f"{HERE}:0", 1, PATIENCE)
    context = multiprocessing.get_context("spawn")

    def start(number: int, dies_at: int = -1) -> multiprocessing.process.BaseProcess:
        process = context.Process(
            target=train, args=(lighthouse.url, number, args.steps, args.members, dies_at), daemon=True
        )
        process.start()
        return process

    dies_at = args.steps // 4 if args.kill else -1
    members = [start(number, dies_at if number == 1 else -1) for number in range(args.members)]
    if args.kill:
        members[1].join()
        members[1] = start(1)
    for process in members:
        process.join()
    lighthouse.close()


if __name__ == "__main__":
    main()
