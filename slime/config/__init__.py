"""The command line: `parse.parse_args()` turns it into checked, frozen `args.Args`, and starts nothing.

- `flags/`: every flag of slime is a field of a dataclass, by group. `parser.py` makes options of the fields.
- `megatron/`, `sglang/`: the flags of both, what follows from them and what cannot work.
- `custom_config.py`, `roles.py`, `resume.py`: what stands for flags (--custom-config-path, --megatron-config-path, a
  finished run).
- `rules/`: what cannot work or has no effect, by topic. `derive.py`: what follows from the flags.
- `parse.py` puts it together, `ask.py` answers --help, --explain, --list-unsupported and --completion.
"""
