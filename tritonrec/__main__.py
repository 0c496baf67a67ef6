"""The console script, and ``python -m tritonrec`` for torchrun."""


def main() -> None:
    """Run the command. A Ctrl-C while its modules are imported ends it as any other, without a traceback."""
    try:
        from .harness.cli import main as run
    except KeyboardInterrupt:
        raise SystemExit(130) from None
    run()


if __name__ == "__main__":
    main()
