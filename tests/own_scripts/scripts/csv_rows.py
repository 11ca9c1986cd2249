"""A CSV table on standard output; cells without an eval are empty."""

from descent import options, train

arguments = options().parse_args()
print("step,epoch,train_loss,val_loss,lr")
for step, loss, held_out in train(arguments):
    print(f"{step},0,{loss:.4f},{held_out if step % 10 == 0 else ''},{arguments.lr}", flush=True)
