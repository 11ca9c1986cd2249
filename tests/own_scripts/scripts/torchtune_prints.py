"""torchtune's StdoutLogger, options as name=value."""

import sys

from descent import options, train

given = dict(word.split("=") for word in sys.argv[1:] if "=" in word and not word.startswith("-"))
arguments = options().parse_args([])
arguments.lr, arguments.batch_size = float(given.get("optimizer.lr", 0.02)), int(given.get("batch_size", 8))
for step, loss, held_out in train(arguments):
    sys.stderr.write(f"\r1|{step}|Loss: {loss}: {step}%|█  | {step}/60 [00:01<00:05, 2.2it/s]")
    print(f"Step {step} | loss:{loss} lr:{arguments.lr} tokens_per_second_per_gpu:1024.5 peak_memory_active:3.1")
    if step % 10 == 0:
        print(f"Step {step} | val_loss:{held_out}", flush=True)
