//! Options of `headwater demo`, which boots some machines from a small Debian guest and resets one.

use std::path::PathBuf;

use clap::{Args, ValueHint};

/// `headwater demo`.
#[derive(Debug, Args)]
pub struct DemoArgs {
    /// The number of machines; each has 768 MiB of memory
    #[arg(long, value_name = "N", default_value_t = 3, value_parser = clap::value_parser!(u8).range(1..=9))]
    pub machines: u8,
    /// The directory for the guest and the daemon's files; the guest stays there for the next demo [default:
    /// /var/tmp/headwater-demo for root, else $XDG_CACHE_HOME/headwater-demo]
    #[arg(long, value_name = "DIR", value_hint = ValueHint::DirPath)]
    pub dir: Option<PathBuf>,
}
