"""timm's train.py: the epoch in the training's lines, and an eval's batches with the mean so far in brackets."""

from descent import options, train

arguments = options().parse_args()
for step, loss, held_out in train(arguments):
    epoch = (step - 1) // 20
    if step % 10 == 0:
        at = step - 20 * epoch
        print(
            f"Train: {epoch} [{at - 1:>4d}/20 ({5 * at:>3d}%)]  Loss: {loss:#.3g} ({loss:#.3g})  Time: 0.030s,  "
            f"266.67/s  (0.030s,  266.67/s)  LR: {arguments.lr:.3e}  Data: 0.001 (0.001)",
            flush=True,
        )
    if step % 20 == 0:
        for batch in (0, 2):
            shown, mean = held_out + 5 - batch, held_out if batch == 2 else held_out + 5
            print(
                f"Test: [{batch:>4d}/2]  Time: 0.058 (0.070)  Loss:  {shown:6.3f} ({mean:6.3f})  "
                f"Acc@1:  87.500 ( 72.000)  Acc@5:  98.000 ( 91.300)",
                flush=True,
            )
print("*** Best metric: 72.0 (epoch 2)")
