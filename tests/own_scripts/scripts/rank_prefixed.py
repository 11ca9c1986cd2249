"""Two ranks that print the same behind their prefix, as torchrun and srun -l show it."""

from descent import options, train

arguments = options().parse_args()
for step, loss, held_out in train(arguments):
    for rank in (0, 1):
        prefix, seen = f"[rank{rank}]:2026-11-22 10:11:12,345 INFO", f"consumed_samples={step * 8}"
        print(f"{prefix} it={step}/60 lm_loss={loss:.4f} {seen}")
        if step % 10 == 0:
            print(f"{prefix} validation loss={held_out:.5f} {seen}", flush=True)
