"""OLMo's trainer: a step in brackets, its measures on lines below, thousands set apart, a time stamp in front."""

from descent import options, train

arguments = options().parse_args()
for step, loss, held_out in train(arguments):
    stamp = f"2026-11-23 10:00:{step:02}.123\tnode0:0\tolmo.train:800\tINFO\t"
    if step % 5 == 0:
        print(f"{stamp}[step={100 * step:,}/6,000,epoch=0]\n    train/CrossEntropyLoss={loss:.3f}", flush=True)
        print(f"    throughput/total_tokens={4096 * step:,}", flush=True)
    if step % 10 == 0:
        print(f"{stamp}[eval_step=10/10]\n    eval/validation/CrossEntropyLoss={held_out:.3f}", flush=True)
