//! The command line of `headwater`: commands, options and their help texts (clap). Only the words of the user:
//! [`crate::cmd`] carries the commands out. The comments of fields and variants are the help texts, and
//! `docs/cli-reference.md` prints them.

mod backup;
mod boot;
mod cache;
mod cloud;
mod complete;
mod config;
mod connection;
mod context;
mod daemon;
mod demo;
mod doctor;
mod export;
mod front_ends;
mod image;
mod libvirt;
mod machine;
mod node;
mod scheme;
mod secrets;
mod size;
mod store;
mod task;
mod top;

use std::net::SocketAddr;
use std::path::PathBuf;

use clap::{Args, Parser, Subcommand, ValueEnum, ValueHint};

pub use self::backup::{BackupArgs, RestoreArgs};
pub use self::boot::{BootCommand, BootMediaArgs, BootOptionsArgs, Product};
pub use self::cache::{By, CacheCommand};
pub use self::cloud::CloudArgs;
pub use self::config::ConfigCommand;
pub use self::connection::{AddConnectionArgs, ConnectionCommand};
pub use self::context::{ContextCommand, LoginArgs};
pub use self::daemon::{DisksArgs, RunArgs, ServeArgs, UpgradeArgs};
pub use self::demo::DemoArgs;
pub use self::doctor::DoctorArgs;
pub use self::export::ExportArgs;
pub use self::front_ends::{AttachArgs, Demand, DetachArgs, FuseArgs, IscsiArgs, NbdArgs, NbdTlsArgs, Via};
pub use self::image::{ImageCommand, TraceCommand};
pub use self::libvirt::{LibvirtCommand, LibvirtDiskArgs, LibvirtDomainArgs};
pub use self::machine::{
    CatalogCommand, MachineArgs, MachineCommand, PersonalityArgs, RollArgs, SchemeVersionCommand, Which,
};
pub use self::node::NodeCommand;
pub use self::scheme::{CheckSchemeArgs, SchemeCommand};
pub use self::secrets::SecretsCommand;
pub use self::size::{AdviseArgs, ImageArgs, SizeCommand, TableArgs};
pub use self::store::{OfferArgs, StoreCommand};
pub use self::task::{TaskCommand, TokenCommand, span};
pub use self::top::TopArgs;

/// One golden disk image, many machines: each with a private write cache in RAM that overflows to disk.
#[derive(Debug, Parser)]
#[command(name = "headwater", version, max_term_width = 100, arg_required_else_help = true)]
#[command(
    after_help = "Exit codes: 0 ok, 1 failed, 2 usage or bad request, 3 not found, 4 in use or conflict, \
                        5 no space, 6 damaged data, 7 daemon not reachable, 130 cancelled. A SIZE or RATE is a number of bytes, or has a \
                        unit: 64K, 512M, 10G, 1T (binary). 'headwater man DIR' writes the manual."
)]
pub struct Cli {
    /// Directory of the store, the database and the socket [default: for root the data-dir of
    /// /etc/headwater/headwater.toml, or /var/lib/headwater; for others $XDG_DATA_HOME/headwater, but client commands use
    /// root's if only root's has a daemon's socket]
    #[arg(long, global = true, display_order = 1000, value_name = "DIR", env = "HEADWATER_DATA_DIR", value_hint = ValueHint::DirPath)]
    pub data_dir: Option<PathBuf>,

    /// The server of 'headwater login' that the command is for, or 'local' for the daemon of this host
    #[arg(long, global = true, display_order = 1000, value_name = "NAME", env = "HEADWATER_CONTEXT", add = complete::contexts())]
    pub context: Option<String>,

    /// Print results (and errors, on standard error) as JSON, for programs
    #[arg(long, global = true, display_order = 1000)]
    pub json: bool,

    /// What to do
    #[command(subcommand)]
    pub command: Command,
}

/// The commands.
#[derive(Debug, Subcommand)]
pub enum Command {
    /// Boot machines from a disk image in the foreground; Ctrl-C stops and removes them
    Run(RunArgs),
    /// Run the daemon
    Serve(Box<ServeArgs>),
    /// Serve the disks of machines to the daemon, so that machines outlive it; 'headwater serve' starts this itself
    Disks(DisksArgs),
    /// Have a new program serve the disks of machines that are on; the machines go on
    Upgrade(UpgradeArgs),
    /// Run on a node: if its controller is silent for the time of the lease, end the machines that another host may start, even if the
    /// daemon is gone; 'headwater serve' starts this itself
    Guard,
    /// Check and show the configuration file of 'headwater serve', without a daemon
    #[command(subcommand)]
    Config(ConfigCommand),
    /// Check whether this host can run machines, and say what to do if not, without a daemon
    Doctor(DoctorArgs),
    /// Boot three machines from a small Debian, fill their write caches beyond RAM and reset one, with a temporary
    /// daemon
    Demo(DemoArgs),
    /// Import, promote, verify, export and remove images and their versions
    #[command(subcommand)]
    Image(ImageCommand),
    /// Create, start, stop, reset, seal and remove machines
    #[command(subcommand)]
    Machine(MachineCommand),
    /// Create, show, change and remove catalogs: groups of machines with the same settings and image
    #[command(subcommand)]
    Catalog(CatalogCommand),
    /// List, follow and cancel tasks: work that continues after the command that started it
    #[command(subcommand)]
    Task(TaskCommand),
    /// Copy the database, keys and certificates of this host's daemon to one file, also while it runs
    Backup(BackupArgs),
    /// Fill an empty data directory from a file of 'headwater backup'
    Restore(RestoreArgs),
    /// Change the key with which the secrets in the database are encrypted, without a daemon
    #[command(subcommand)]
    Secrets(SecretsCommand),
    /// Let other hosts run machines too: join, list, cordon and remove them
    #[command(subcommand)]
    Node(NodeCommand),
    /// Create, list and revoke tokens for the API over TCP
    #[command(subcommand)]
    Token(TokenCommand),
    /// Use the API of a server on another host from now on
    Login(LoginArgs),
    /// Forget the current server, or that of --context, and its token; a login with --oidc also ends at the server
    Logout,
    /// List, choose and forget the servers of 'headwater login'
    #[command(subcommand)]
    Context(ContextCommand),
    /// Add, list, check, change, sweep and remove connections to Azure, to which images are published
    #[command(subcommand)]
    Connection(ConnectionCommand),
    /// Calculate which sizes of virtual machines in a cloud have space for an OS disk, without a daemon
    #[command(subcommand)]
    Size(SizeCommand),
    /// Check a cloud scheme, which describes how machines are created in a cloud (not 'catalog scheme'), without a daemon
    #[command(subcommand)]
    Scheme(SchemeCommand),
    /// Prepare network boot, without a daemon
    #[command(subcommand)]
    Boot(BootCommand),
    /// Copy versions between stores, serve, verify and repair a store, without a daemon
    #[command(subcommand)]
    Store(StoreCommand),
    /// Print a link that opens the web console of 'serve --console' once, and open it if there is a desktop
    Console(ConsoleArgs),
    /// Show what the daemon and its host do
    Status,
    /// Show the host and its machines, refreshed each second; the largest write caches first
    Top(TopArgs),
    /// Show the metrics of the host and of machines that are on
    Stats(StatsArgs),
    /// Show who changed what, and when
    Events(EventsArgs),
    /// Write the history to a file as a hash chain, and check such a file: changed and removed events are found
    #[command(subcommand)]
    Audit(AuditCommand),
    /// Serve one volume in the foreground over one or more of NBD, vhost-user, iSCSI, FUSE and a block device, or one volume
    /// for each of many machines, without a daemon
    Export(ExportArgs),
    /// Make one volume a block device of this kernel, until Ctrl-C, SIGTERM or 'headwater detach'
    #[command(mut_group("front-end", |group| group.required(false)))]
    Attach(ExportArgs),
    /// Print XML for domains of libvirt whose disks 'headwater export' serves, without a daemon
    #[command(subcommand)]
    Libvirt(LibvirtCommand),
    /// Show and change the limits of write caches of running exports and attached devices, without a daemon; show the
    /// contents of a machine's write cache
    #[command(subcommand)]
    Cache(CacheCommand),
    /// Remove a block device that 'headwater attach' made
    Detach(DetachArgs),
    /// List the block devices that 'headwater attach' made; 'headwater list' does the same
    #[command(visible_alias = "list")]
    Attachments,
    /// Print the completions for a shell
    Completions {
        /// The shell
        shell: clap_complete::Shell,
    },
    /// Write the manual pages to a directory
    Man {
        /// The directory; made if it does not exist
        #[arg(value_hint = ValueHint::DirPath, required_unless_present = "markdown")]
        dir: Option<PathBuf>,
        /// Print every command and option as one page of Markdown instead
        #[arg(long, conflicts_with = "dir")]
        markdown: bool,
    },
}

/// Parses the address of a listener.
fn ip_and_port(text: &str) -> Result<SocketAddr, String> {
    text.parse().map_err(|_| "it is not IP:PORT, such as 127.0.0.1:8090 or [::1]:8090".to_owned())
}

/// Parses the size of a disk's sectors.
fn sector_bytes(text: &str) -> Result<u32, String> {
    match text {
        "512" => Ok(512),
        "4096" => Ok(4096),
        _ => Err("a disk has sectors of 512 or 4096 bytes".to_owned()),
    }
}

/// Parses the absolute path of a file in a guest.
fn guest_path(text: &str) -> Result<String, String> {
    headwater_api::check_guest_path(text).map_err(|problem| problem.message)?;
    Ok(text.to_owned())
}

/// The format of a log.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum LogFormat {
    /// Lines for people
    Text,
    /// One JSON object a line
    Json,
}

impl LogFormat {
    /// The value of `--log-format` for this format.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Text => "text",
            Self::Json => "json",
        }
    }
}

/// `headwater console`.
#[derive(Debug, Args)]
pub struct ConsoleArgs {
    /// The role of the session: viewer, operator or admin
    #[arg(long, default_value = "admin", value_parser = headwater_api::Role::parse)]
    pub role: headwater_api::Role,
    /// Only print the link
    #[arg(long)]
    pub print: bool,
}

/// `headwater stats`.
#[derive(Debug, Args)]
pub struct StatsArgs {
    /// Only the metrics of this machine
    #[arg(add = complete::machines())]
    pub machine: Option<String>,
    /// Print them each second, with the rates of counters, until Ctrl-C
    #[arg(long)]
    pub watch: bool,
}

/// `headwater events`.
#[derive(Debug, Args)]
pub struct EventsArgs {
    /// Only the events of this subject, for instance 'machine web-1'
    #[arg(long)]
    pub subject: Option<String>,
    /// Only events older than the event with this id, which --json shows
    #[arg(long, value_name = "ID")]
    pub before: Option<i64>,
    /// Print new events as they occur, until Ctrl-C; with --json one object a line
    #[arg(long, conflicts_with = "before")]
    pub follow: bool,
    /// The most events to print, the newest ones; the daemon keeps at least the newest 100,000
    #[arg(long, value_name = "COUNT", default_value_t = 100)]
    pub limit: u32,
}

/// `headwater audit ...`.
#[derive(Debug, Subcommand)]
pub enum AuditCommand {
    /// Add the events that are new since the last export to a file, and check that the history continues the file
    Export {
        /// The file; created if it does not exist
        #[arg(value_hint = ValueHint::FilePath)]
        file: PathBuf,
        /// Begin a new file with the events after this one, if an earlier event does not follow the event before it
        #[arg(long, value_name = "ID")]
        after: Option<i64>,
    },
    /// Check that a file of 'audit export' was not changed, without a daemon
    Check {
        /// The file
        #[arg(value_hint = ValueHint::FilePath)]
        file: PathBuf,
    },
}

/// Removes `[default: ..]` from an option's help, for a command that changes nothing if an option is not given. The
/// options of the hours keep theirs, because `--from` resets all of them.
pub(super) fn without_default(arg: clap::Arg) -> clap::Arg {
    if ["days", "zone", "stop_idle"].contains(&arg.get_id().as_str()) {
        return arg;
    }
    let shorter = |help: &clap::builder::StyledStr| {
        help.to_string().split_once(" [default: ").map(|(text, _)| text.to_owned())
    };
    let (help, long) = (arg.get_help().and_then(shorter), arg.get_long_help().and_then(shorter));
    let arg = if let Some(help) = help { arg.help(help) } else { arg };
    if let Some(long) = long { arg.long_help(long) } else { arg }
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::CommandFactory;
    use headwater_api::{CacheSettings, DiskTransport};

    #[test]
    fn the_command_line_is_sound() {
        Cli::command().debug_assert();
    }

    #[test]
    fn a_machine_after_wait_is_a_machine() {
        let parse = |args: &[&str]| {
            let cli = Cli::try_parse_from(["headwater", "machine"].iter().chain(args)).unwrap();
            match cli.command {
                Command::Machine(
                    MachineCommand::Start { which, wait, .. } | MachineCommand::Reset { which, wait },
                ) => (which.names, wait),
                _ => panic!("neither start nor reset"),
            }
        };
        for verb in ["start", "reset"] {
            let both = vec!["desk-1".to_owned(), "2".to_owned()];
            assert_eq!(parse(&[verb, "--wait", "desk-1", "2"]), (both.clone(), Some(600)));
            assert_eq!(parse(&[verb, "desk-1", "2", "--wait"]), (both.clone(), Some(600)));
            assert_eq!(parse(&[verb, "desk-1", "--wait=30", "2"]), (both, Some(30)));
        }
    }

    #[test]
    fn defaults_are_those_of_the_api() {
        let cli = Cli::parse_from(["headwater", "run", "x.qcow2"]);
        let Command::Run(run) = cli.command else { panic!("not run") };
        let default = CacheSettings::default();
        assert_eq!((run.machine.cache_settings(default).unwrap(), run.count), (default, 1));
        // The help texts say what the API does.
        let help_of =
            |command| Cli::command().find_subcommand_mut(command).unwrap().render_long_help().to_string();
        let (help, export) = (help_of("run"), help_of("export"));
        for default in
            [format!("[default: {}]", default.mode), "[default: 64M]".into(), "[default: 10G]".into()]
        {
            assert!(export.contains(&default), "{default}: {export}");
        }
        let size = headwater_block::size::format;
        let memory = size(headwater_api::CreateMachine::default_memory_bytes());
        let said = |text: String| assert!(help.contains(&text), "{text}: {help}");
        said(format!("[default: {}]", default.mode));
        said(format!("[default: {}]", default.weight));
        said(format!("[default: {}]", headwater_api::CreateMachine::default_cpus()));
        said(format!("[default: {}]", DiskTransport::default()));
        for (short, long) in
            [("64M", size(default.ram_bytes)), ("10G", size(default.disk_bytes)), ("512M", memory)]
        {
            assert_eq!(headwater_block::size::format(headwater_block::size::parse(short).unwrap()), long);
            said(format!("[default: {short}]"));
        }
    }
}
