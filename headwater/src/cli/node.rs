//! Subcommands and options of `headwater node`: the hosts of a fleet. A node is the program that runs machines on a
//! host for a controller.

use clap::Subcommand;

use crate::cli::task::span;

/// `headwater node ...`.
#[derive(Debug, Subcommand)]
pub enum NodeCommand {
    /// Print a token with which one host joins, and the command to use it; on a controller with 'serve --nodes'
    Token {
        /// How long it is valid, such as 15m or 12h; at most a day
        #[arg(long, value_name = "TIME", value_parser = span, default_value = "1h")]
        expires: u64,
    },
    /// Make this host a node of a controller; no daemon may run here. 'headwater serve' connects to the controller
    /// from then on
    Join {
        /// The controller's port for nodes, https://HOST:PORT; the port is 9472 unless given. Several for controllers of one database
        /// ('serve --standby')
        #[arg(required = true, value_name = "URL")]
        urls: Vec<String>,
        /// The token, as 'headwater node token' on the controller prints it; '-' reads it from standard input, where
        /// no other user of this host sees it. Without a token, a host that has joined changes the URLs of its
        /// fleet's controllers
        #[arg(long, value_name = "TOKEN")]
        token: Option<String>,
        /// The name of this host: 1 to 63 of a-z, 0-9 and '-' [default: its host name]
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
    /// Place new machines on other hosts; existing machines stay
    Cordon {
        /// Its name
        host: String,
    },
    /// Cordon a host, and move its machines of catalogs to other hosts: those that are on are stopped and restarted
    /// there. Machines that keep their disk, are claimed, edit an image, or are of a pool or of no catalog stay, as do
    /// those that no other host has room for or can run; they are listed
    Drain {
        /// Its name
        host: String,
    },
    /// Place new machines on a host again
    Uncordon {
        /// Its name
        host: String,
    },
    /// Have a node accept the controller, although the controller's database is an old copy: it is the valid database from
    /// then on
    Accept {
        /// Its name
        host: String,
    },
    /// Remove a host from the fleet: its node cannot connect any more
    Remove {
        /// Its name
        host: String,
        /// Also remove its machines from the database; they stay as they are on that host
        #[arg(long)]
        force: bool,
    },
}
