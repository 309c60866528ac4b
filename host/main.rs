//! The command line. `megamoe help` lists the commands.

mod cli;

fn main() -> std::process::ExitCode {
    cli::main()
}
