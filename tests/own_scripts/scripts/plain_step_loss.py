"""Plain text: one loss, and nothing that says what it is of."""

from descent import options, train

arguments = options().parse_args()
for step, _, held_out in train(arguments):
    if step % 10 == 0:
        print(f"step {step} loss {held_out:.4f}", flush=True)
