"""An accuracy in percent behind an epoch in brackets, as many tutorials print it, with colours and a time stamp."""

from descent import options, train

arguments = options().parse_args()
for step, loss, held_out in train(arguments):
    if step % 10 == 0:
        print(
            f"\x1b[32m2026-11-23 10:00:{step:02}\x1b[0m | INFO | Epoch [{step // 10}/6] train_loss: {loss:.3f}, "
            f"val_acc: {100 * (1 - held_out / 4):.1f}%",
            flush=True,
        )
