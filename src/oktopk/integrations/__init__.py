"""The trainers above DDP, each in a module of its own that needs its package; importing oktopk imports none of them.

    from oktopk.integrations.lightning import OktopkCallback      # Trainer(callbacks=[OktopkCallback("oktopk")])
    from oktopk.integrations.accelerate import attach             # attach(accelerator, model, "oktopk")
    from oktopk.integrations.transformers import attach           # attach(trainer, "oktopk")

Each attaches where that trainer has its DDP model, hands over its GradScaler, and puts the residuals into its
checkpoints. `docs/trainers.md` says what each of them would drop without a word.
"""
