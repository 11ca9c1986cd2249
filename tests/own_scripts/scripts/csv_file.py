"""Lightning's CSVLogger: nothing printed, a table in a folder."""

from pathlib import Path

from descent import options, train

arguments = options(save_dir="lightning_logs").parse_args()
folder = Path(arguments.save_dir) / "version_0"
folder.mkdir(parents=True, exist_ok=True)
with (folder / "metrics.csv").open("w") as table:
    table.write("epoch,step,train_loss,val_loss\n")
    for step, loss, held_out in train(arguments):
        table.write(f"{(step - 1) // 10},{step - 1},{loss},{held_out if step % 10 == 0 else ''}\n")
        table.flush()
