//! `headwater-agent`: the program in the initramfs of a machine that boots from the network.

use std::process::ExitCode;

fn main() -> ExitCode {
    headwater_agent::run()
}
