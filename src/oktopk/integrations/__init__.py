"""Integrations with trainers above DDP. Each needs its package; importing oktopk imports none of them.

    from oktopk.integrations.lightning import OktopkCallback      # Trainer(callbacks=[OktopkCallback("oktopk")])
    from oktopk.integrations.accelerate import attach             # attach(accelerator, model, "oktopk")
    from oktopk.integrations.transformers import attach           # attach(trainer, "oktopk")

Each attaches to the DDP model inside the trainer, hands over the GradScaler, and puts the residuals into the
checkpoints. `docs/trainers.md` lists the hooks that each trainer drops without a word.
"""
