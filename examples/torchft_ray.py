"""Members that Ray Train starts again when they die: python examples/torchft_ray.py --kill

It needs `pip install 'ray[train]'` beside oktopk[torchft]. TorchftConfig starts the lighthouse, and replaces a worker
that died alone, while the others go on. Each worker is a member. With --kill the second one is killed amid the run.
"""

import argparse
import hashlib
import logging
import os
import signal
import tempfile
import time
import warnings
from pathlib import Path

import ray
import ray.train
import torch
from ray.train import FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer
from ray.train.v2.torch.torchft_config import TorchftConfig
from torch import nn

from oktopk import OkTopk
from oktopk.integrations.torchft import attach
from oktopk.integrations.torchft.start import Patience, address_towards, make_manager

PATIENCE = Patience(collective_s=10.0, quorum_s=60.0)


def train(config: dict) -> None:
    logging.disable(logging.WARNING)  # torchft says much
    warnings.simplefilter("ignore")
    number, members = ray.train.get_context().get_world_rank(), ray.train.get_context().get_world_size()
    net = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 10))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)
    lighthouse = os.environ["TORCHFT_LIGHTHOUSE"]
    manager, close = make_manager(
        lighthouse, address_towards(lighthouse), name=f"member{number}", min_members=1, patience=PATIENCE
    )
    member = attach(net, optimizer, OkTopk(), manager=manager, dense_steps=20)
    killed, size = Path(config["folder"]) / "killed", 0
    while member.step_number < config["steps"] or member.size < members:  # alike on all
        member.zero_grad()  # joins a quorum; a member that is behind gets weights, optimizer and step from another
        samples = torch.Generator().manual_seed(1000 * member.step_number + member.rank)
        x = torch.randn(64, 64, generator=samples)
        loss = nn.functional.cross_entropy(net(x), x[:, :10].argmax(dim=1))
        loss.backward()
        if config["kill"] and number == 1 and member.step_number >= config["steps"] // 4 and not killed.exists():
            killed.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        if not member.step():  # a member died: nothing has changed, make the same batch again
            print(f"member {number}: step {member.step_number} is not committed", flush=True)
        elif member.size != size:
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
    parser.add_argument("--kill", action="store_true", help="kill the second member amid the run")
    args = parser.parse_args()
    environment = {"env_vars": {"RUST_LOG": "error"}}  # or the lighthouse tells every quorum
    ray.init(num_cpus=args.members + 1, include_dashboard=False, runtime_env=environment)
    with tempfile.TemporaryDirectory() as folder:
        TorchTrainer(
            train,
            train_loop_config={"steps": args.steps, "kill": args.kill, "folder": folder},
            scaling_config=ScalingConfig(num_workers=args.members),
            torch_config=TorchftConfig(lighthouse_kwargs={"min_replicas": 1}, backend="gloo"),
            run_config=RunConfig(storage_path=folder, failure_config=FailureConfig(max_failures=2)),
        ).fit()
    ray.shutdown()


if __name__ == "__main__":
    main()
