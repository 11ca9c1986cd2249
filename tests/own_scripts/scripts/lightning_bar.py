"""Lightning's progress bar, drawn again and again, with the last val_loss in it."""

import sys

from descent import options, train

arguments = options().parse_args()
shown = ""
for step, loss, held_out in train(arguments):
    epoch, batch = (step - 1) // 10, (step - 1) % 10 + 1
    bar = f"Epoch {epoch}: {batch * 10:3d}%|{'█' * batch:10}| {batch}/10 [00:00<00:00, 80.1it/s"
    bar += f", v_num=0, train_loss={loss:.3f}"
    sys.stdout.write(f"\r{bar}{shown}]")
    if batch == 10:
        sys.stdout.write(
            "\rValidation: |          | 0/? [00:00<?, ?it/s]\rValidation DataLoader 0: 100%|██████████| 1/1 [00:00]"
        )
        shown = f", val_loss={held_out:.4f}"
        sys.stdout.write(f"\r{bar}{shown}]\n")
    sys.stdout.flush()
