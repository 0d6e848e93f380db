//! Subcommands and options of `headwater task` (the daemon's long operations) and `headwater token` (tokens for the
//! API).

use std::path::PathBuf;

use clap::{Subcommand, ValueHint};
use headwater_api::Role;

use crate::cli::complete;

/// `headwater task ...`.
#[derive(Debug, Subcommand)]
pub enum TaskCommand {
    /// List the newest tasks
    List {
        /// Only those that have not ended
        #[arg(long)]
        unended: bool,
        /// The most tasks to show; the daemon stores the newest 10,000
        #[arg(long, value_name = "COUNT", default_value_t = 20, value_parser = clap::value_parser!(u32).range(1..=1000))]
        limit: u32,
    },
    /// Show a task
    Show {
        /// Its number
        task: i64,
    },
    /// Follow a task until it ends, and exit like the command that began it. The task continues if this command is
    /// interrupted
    Wait {
        /// Its number
        task: i64,
    },
    /// Cancel a task, and follow it until it has ended: a roll moves its machines back first
    Cancel {
        /// Its number
        task: i64,
    },
}

/// `headwater token ...`.
#[derive(Debug, Subcommand)]
pub enum TokenCommand {
    /// Make a token and print its secret, which cannot be shown again
    Create {
        /// Its name: 1 to 63 of a-z, 0-9 and '-'. The history names it
        name: String,
        /// The token's role: metrics, viewer, operator or admin
        #[arg(long, value_parser = Role::parse)]
        role: Role,
        /// Only for this catalog and its machines; '*' matches any characters; may be given several times
        #[arg(long, value_name = "CATALOG", add = complete::catalogs())]
        catalog: Vec<String>,
        /// Only for this image and machines without a catalog that boot it; '*' matches any characters; may be given
        /// several times
        #[arg(long, value_name = "IMAGE", add = complete::images())]
        image: Vec<String>,
        /// How long it is valid, such as 12h or 90d [default: until it is revoked]
        #[arg(long, value_name = "TIME", value_parser = span)]
        expires: Option<u64>,
        /// Recognise the client by this certificate in PEM, and not by a secret; the token expires with it
        #[arg(long, value_name = "FILE", value_hint = ValueHint::FilePath)]
        certificate: Option<PathBuf>,
    },
    /// List all tokens, without their secrets
    List,
    /// Revoke a token: requests with it are refused from now on
    Revoke {
        /// Its name
        name: String,
    },
}

/// A time such as `30s`, `15m`, `12h` or `90d`, in seconds.
pub fn span(text: &str) -> Result<u64, String> {
    let digits = text.trim_end_matches(|c: char| c.is_ascii_alphabetic());
    let unit = match text.get(digits.len()..).unwrap_or_default() {
        "" | "s" => 1,
        "m" => 60,
        "h" => 3600,
        "d" => 86_400,
        _ => return Err("write a number and one of s, m, h, d, such as 12h or 90d".to_owned()),
    };
    let count: u64 =
        digits.parse().map_err(|_| "write a number and a unit, such as 12h or 90d".to_owned())?;
    count.checked_mul(unit).filter(|seconds| *seconds > 0).ok_or_else(|| "it is out of range".to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn spans_have_units() {
        assert_eq!(["30", "30s", "15m", "12h", "90d"].map(span), [30, 30, 900, 43_200, 7_776_000].map(Ok));
        for odd in ["", "d", "0h", "1w", "-1d", "1.5h", "99999999999999999999d"] {
            assert!(span(odd).is_err(), "{odd}");
        }
    }
}
