"""A language model with memories, trained in chunks of a batch with apex; no native branch.

Prints each loss and norm of the gradients exactly, so that two runs can be compared bit for bit.
"""

import argparse

import torch
from language_model import MemoryTransformer, segments

from apex import amp


def train_iteration(model, i, mems, data_chunks, target_chunks, optimizer, delay_unscale, args):
    data_i = data_chunks[i].contiguous()
    target_i = target_chunks[i].contiguous()

    loss, mems[i] = model(data_i, target_i, mems[i])
    loss = loss.float().mean().type_as(loss) / args.batch_chunk

    if args.fp16:
        with amp.scale_loss(loss, optimizer, delay_unscale=delay_unscale) as scaled_loss:
            scaled_loss.backward()
    else:
        loss.backward()

    return loss.float().item()


def save_checkpoint(args, model, optimizer, scheduler, train_step, path):
    if args.fp16:
        amp_state = amp.state_dict()
    else:
        amp_state = None

    state = {
        "model_state": model.state_dict(),
        "optimizer_state": optimizer.state_dict(),
        "scheduler_state": scheduler.state_dict(),
        "amp_state": amp_state,
        "train_step": train_step,
    }
    torch.save(state, path)


def load_checkpoint(args, model, optimizer, scheduler, path):
    state = torch.load(path, map_location="cpu")
    model.load_state_dict(state["model_state"])
    optimizer.load_state_dict(state["optimizer_state"])
    scheduler.load_state_dict(state["scheduler_state"])
    if args.fp16:
        amp.load_state_dict(state["amp_state"])
    return state["train_step"]


def parse_args():
    parser = argparse.ArgumentParser(description="Language model at toy size")
    parser.add_argument("--fp16", action="store_true", help="mixed precision")
    parser.add_argument("--opt_level", default="O2", choices=["O0", "O1", "O2", "O3"])
    parser.add_argument("--max_step", type=int, default=12)
    parser.add_argument("--batch_size", type=int, default=4)
    parser.add_argument("--batch_chunk", type=int, default=2)
    parser.add_argument("--tgt_len", type=int, default=8)
    parser.add_argument("--lr", type=float, default=1e-2)
    parser.add_argument("--clip", type=float, default=0.25)
    parser.add_argument("--seed", type=int, default=1111)
    parser.add_argument("--save", help="write a checkpoint at the end")
    parser.add_argument("--resume", help="go on from a checkpoint, with empty memories")
    return parser.parse_args()


def main():
    args = parse_args()
    torch.manual_seed(args.seed)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")

    model = MemoryTransformer().to(device)
    optimizer = torch.optim.Adam(model.parameters(), lr=args.lr)
    if args.fp16:
        model, optimizer = amp.initialize(model, optimizer, opt_level=args.opt_level)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, args.max_step)

    first = load_checkpoint(args, model, optimizer, scheduler, args.resume) if args.resume else 0
    mems = [None for _ in range(args.batch_chunk)]
    model.train()
    for train_step, (data, target) in zip(
        range(args.max_step), segments(args.seed, args.tgt_len, args.batch_size)
    ):
        if train_step < first:
            continue
        for param in model.parameters():
            param.grad = None

        data_chunks = torch.chunk(data.to(device), args.batch_chunk, 1)
        target_chunks = torch.chunk(target.to(device), args.batch_chunk, 1)

        train_loss = 0.0
        for i in range(args.batch_chunk):
            delay_unscale = i < args.batch_chunk - 1
            train_loss += train_iteration(
                model, i, mems, data_chunks, target_chunks, optimizer, delay_unscale, args
            )

        if args.fp16:
            norm = torch.nn.utils.clip_grad_norm_(amp.master_params(optimizer), args.clip)
        else:
            norm = torch.nn.utils.clip_grad_norm_(model.parameters(), args.clip)

        optimizer.step()
        scheduler.step()
        print(f"step {train_step} loss {train_loss.hex()} norm {norm.item().hex()}")

    if args.save:
        save_checkpoint(args, model, optimizer, scheduler, args.max_step, args.save)
    total = sum(parameter.detach().double().abs().sum().item() for parameter in model.parameters())
    print(f"parameters {total.hex()}")


if __name__ == "__main__":
    main()
