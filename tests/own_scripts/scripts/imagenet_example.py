"""PyTorch's ImageNet example: meters of batches, and an eval's result on a line behind it."""

from descent import options, train

arguments = options().parse_args()
for step, loss, held_out in train(arguments):
    epoch = (step - 1) // 20
    if step % 10 == 0:
        print(
            f"Epoch: [{epoch}][{step - 20 * epoch:3d}/20]\tTime  0.030 ( 0.031)\tLoss {loss:.4e} ({loss:.4e})",
            flush=True,
        )
    if step % 20 == 0:
        for batch in (1, 11):
            print(f"Test: [{batch:3d}/15]\tTime  0.010 ( 0.010)\tLoss {held_out:.4e} ({held_out:.4e})", flush=True)
        print(f" *   Acc@1 {100 * (1 - held_out / 4):.3f} Acc@5 99.900", flush=True)
