//! Flags of `headwater demo`.

use std::path::PathBuf;

use clap::{Args, ValueHint};

/// `headwater demo`.
#[derive(Debug, Args)]
pub struct DemoArgs {
    /// How many machines boot; each has 768 MiB of memory
    #[arg(long, value_name = "N", default_value_t = 3, value_parser = clap::value_parser!(u8).range(1..=9))]
    pub machines: u8,
    /// The directory of the guest and of the daemon's files; the guest is kept for the next time [default: /var/tmp/headwater-demo for
    /// root, else $XDG_CACHE_HOME/headwater-demo]
    #[arg(long, value_name = "DIR", value_hint = ValueHint::DirPath)]
    pub dir: Option<PathBuf>,
}
