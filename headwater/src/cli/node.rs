//! `headwater node`.

use clap::Subcommand;

use crate::cli::task::span;

/// `headwater node ...`.
#[derive(Debug, Subcommand)]
pub enum NodeCommand {
    /// Print a token with which one host joins, and how; on the controller, which has 'serve --nodes'
    Token {
        /// For how long it is valid, such as 15m or 12h; at most a day
        #[arg(long, value_name = "TIME", value_parser = span, default_value = "1h")]
        expires: u64,
    },
    /// Make this host a node of a controller, while no daemon runs here; 'headwater serve' connects it from then on
    Join {
        /// The controller's port for nodes, https://HOST:PORT; the port is 9472 unless given. Several for controllers of one database
        /// ('serve --standby')
        #[arg(required = true, value_name = "URL")]
        urls: Vec<String>,
        /// The token, as 'headwater node token' prints it on the controller; '-' reads it from the standard input, where no other user
        /// of this host sees it. Without a token, a host that has joined gets other URLs for the controllers of its fleet
        #[arg(long, value_name = "TOKEN")]
        token: Option<String>,
        /// What to call this host: 1 to 63 of a-z, 0-9 and '-' [default: its host name]
        #[arg(long, value_name = "NAME")]
        name: Option<String>,
    },
    /// List all hosts
    List,
    /// Show a host and its latest events
    Show {
        /// Its name
        host: String,
    },
    /// Have new machines go to other hosts; those that are there stay
    Cordon {
        /// Its name
        host: String,
    },
    /// Cordon a host, and move its machines of catalogs to other hosts: those that are on are stopped, and started there. Machines that keep
    /// a disk, are claimed or are of no catalog stay, and are named
    Drain {
        /// Its name
        host: String,
    },
    /// Let a host have new machines again
    Uncordon {
        /// Its name
        host: String,
    },
    /// Let a node in that is refused because the controller's database is an old copy: what the copy says counts from then on
    Accept {
        /// Its name
        host: String,
    },
    /// Remove a host from the fleet: its node is not let in any more
    Remove {
        /// Its name
        host: String,
        /// Also forget its machines, which stay as they are on that host
        #[arg(long)]
        force: bool,
    },
}
