//! The command line.

use std::net::SocketAddr;
use std::path::PathBuf;

use clap::{Args, Parser, Subcommand, ValueEnum, ValueHint};
use headwater_api::{CacheMode, CacheSettings, Channel, DiskTransport, ExportFormat};

use crate::cmd::attach::DetachArgs;
use crate::cmd::export::ExportArgs;

/// One golden disk image, many machines: each with a private write cache in RAM that overflows to disk.
#[derive(Debug, Parser)]
#[command(name = "headwater", version, max_term_width = 100, arg_required_else_help = true)]
#[command(
    after_help = "Exit codes: 0 ok, 1 failed, 2 usage or bad request, 3 not found, 4 in use or conflict, \
                        5 no space, 6 damaged data, 7 daemon not reachable. 'headwater man DIR' writes the manual."
)]
pub struct Cli {
    /// Directory of the store, the database and the socket [default: /var/lib/headwater for root, else
    /// $XDG_DATA_HOME/headwater]
    #[arg(long, global = true, value_name = "DIR", env = "HEADWATER_DATA_DIR", value_hint = ValueHint::DirPath)]
    pub data_dir: Option<PathBuf>,

    /// Print results (and errors, on standard error) as JSON, for programs
    #[arg(long, global = true)]
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
    Serve(ServeArgs),
    /// Import, promote, verify, export and remove images and their versions
    #[command(subcommand)]
    Image(ImageCommand),
    /// Create, start, stop, reset and remove machines
    #[command(subcommand)]
    Machine(MachineCommand),
    /// Show what the daemon and its host do
    Status,
    /// Show the metrics of the host and of machines that are on
    Stats(StatsArgs),
    /// Show who changed what, and when
    Events(EventsArgs),
    /// Serve one volume over NBD in the foreground, without a daemon
    Export(ExportArgs),
    /// Make one volume a block device of this kernel, until Ctrl-C, SIGTERM or 'headwater detach'
    #[command(mut_group("front-end", |group| group.required(false)))]
    Attach(ExportArgs),
    /// Remove a block device that 'headwater attach' made
    Detach(DetachArgs),
    /// List the block devices that 'headwater attach' made
    Attachments,
    /// Print the completions for a shell
    Completions {
        /// The shell
        shell: clap_complete::Shell,
    },
    /// Write the manual pages to a directory
    Man {
        /// The directory; made if it does not exist
        #[arg(value_hint = ValueHint::DirPath)]
        dir: PathBuf,
    },
}

/// A machine's write cache and size.
#[derive(Debug, Args)]
pub struct MachineArgs {
    /// Where writes go: ram, ram+disk or disk
    #[arg(long, value_name = "MODE", default_value = "ram+disk", value_parser = CacheMode::parse)]
    pub cache: CacheMode,
    /// The most memory that the write cache takes
    #[arg(long, value_name = "SIZE", default_value = "64M", value_parser = size)]
    pub ram: u64,
    /// The most disk space that the write cache takes
    #[arg(long, value_name = "SIZE", default_value = "10G", value_parser = size)]
    pub disk: u64,
    /// The guest's memory
    #[arg(long, value_name = "SIZE", default_value = "512M", value_parser = size)]
    pub memory: u64,
    /// The guest's processors
    #[arg(long, value_name = "COUNT", default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..))]
    pub cpus: u32,
    /// How the guest reaches its disk: vhost-user (memory shared with the daemon) or nbd (a socket)
    #[arg(long, value_name = "HOW", default_value_t, value_parser = DiskTransport::parse)]
    pub transport: DiskTransport,
    /// File with cloud-init user data for the guest (#cloud-config, a script, ...)
    #[arg(long, value_name = "FILE", value_hint = ValueHint::FilePath)]
    pub user_data: Option<PathBuf>,
}

impl MachineArgs {
    /// The write cache as the API has it.
    pub fn cache_settings(&self) -> CacheSettings {
        CacheSettings { mode: self.cache, ram_bytes: self.ram, disk_bytes: self.disk }
    }
}

/// `headwater run`.
#[derive(Debug, Args)]
pub struct RunArgs {
    /// A raw, qcow2, VHD, VHDX or VMDK file, an NBD URI, or an image of the store (IMAGE, IMAGE@VERSION)
    #[arg(value_name = "FILE|IMAGE", value_hint = ValueHint::FilePath)]
    pub source: String,
    /// How many machines
    #[arg(short = 'n', long, value_name = "COUNT", default_value_t = 1,
          value_parser = clap::value_parser!(u32).range(1..=1000))]
    pub count: u32,
    /// Write cache and size of each machine
    #[command(flatten)]
    pub machine: MachineArgs,
}

/// `headwater serve`.
#[derive(Debug, Args)]
pub struct ServeArgs {
    /// Also listen on a TCP address of the loopback interface, for instance 127.0.0.1:8080; its clients send
    /// 'Authorization: Bearer TOKEN' with the token of the file DIR/api.token, which is made for it
    #[arg(long, value_name = "ADDR")]
    pub listen: Option<SocketAddr>,
    /// How long a write waits for room in its write cache before the machine is told that there is none
    #[arg(long, value_name = "SECONDS", default_value_t = 30)]
    pub pause: u64,
    /// How the log is written
    #[arg(long, value_enum, default_value_t = LogFormat::Text)]
    pub log_format: LogFormat,
    /// What is logged: error, warn, info, debug, trace, or a filter such as headwater_service=debug
    #[arg(long, value_name = "FILTER", default_value = "info", env = "HEADWATER_LOG")]
    pub log: String,
}

/// How a log is written.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum LogFormat {
    /// Lines for people
    Text,
    /// One JSON object a line
    Json,
}

/// `headwater image ...`.
#[derive(Debug, Subcommand)]
pub enum ImageCommand {
    /// Make a version of a raw, qcow2, VHD, VHDX or VMDK file, or of an NBD export
    Import {
        /// A file, - for standard input, or nbd://HOST[:PORT]/NAME or nbd+unix:///NAME?socket=PATH
        #[arg(value_name = "FILE|URI", value_hint = ValueHint::FilePath)]
        source: String,
        /// The image's name [default: the file's name without its extension]
        #[arg(long)]
        name: Option<String>,
        /// A line about the version, for people
        #[arg(long)]
        note: Option<String>,
    },
    /// List all images
    List,
    /// List an image's versions: channels, state, author, machines that run them
    Versions {
        /// IMAGE
        image: String,
    },
    /// Have a channel point to a version; machines get it at their next boot
    Promote {
        /// IMAGE@NUMBER or IMAGE@HASH; with --cancel IMAGE
        image: String,
        /// test or production
        #[arg(value_parser = Channel::parse)]
        channel: Channel,
        /// When: 2026-12-24T03:00Z (UTC), or +90m, +12h, +7d from now
        #[arg(long, value_name = "TIME", conflicts_with = "cancel")]
        at: Option<String>,
        /// Forget the promotion to come of this channel
        #[arg(long)]
        cancel: bool,
    },
    /// Have a channel point where it pointed before
    Revert {
        /// IMAGE
        image: String,
        /// test or production
        #[arg(value_parser = Channel::parse)]
        channel: Channel,
    },
    /// Have a machine boot one version, whatever the channels say
    Pin {
        /// The machine
        machine: String,
        /// IMAGE@NUMBER or IMAGE@HASH
        image: String,
    },
    /// Let a machine follow its image again
    Unpin {
        /// The machine
        machine: String,
    },
    /// Take a version out of use: it is not the newest any more and cannot be promoted
    Retire {
        /// IMAGE@NUMBER or IMAGE@HASH
        image: String,
        /// Bring it back
        #[arg(long)]
        undo: bool,
    },
    /// Show what changed between two versions: bytes, and files of ext2, ext3 and ext4 file systems
    Diff {
        /// The older one: IMAGE, IMAGE:CHANNEL, IMAGE@NUMBER or IMAGE@HASH
        from: String,
        /// The newer one
        to: String,
    },
    /// Show who changed an image, and when
    History {
        /// IMAGE
        image: String,
        /// At most so many changes
        #[arg(long, default_value_t = 100)]
        limit: u32,
    },
    /// Show an image and its versions
    Show {
        /// IMAGE, IMAGE:CHANNEL, IMAGE@NUMBER or IMAGE@HASH
        image: String,
    },
    /// Read all of a version and compare it with its hashes
    Verify {
        /// IMAGE, IMAGE:CHANNEL, IMAGE@NUMBER or IMAGE@HASH
        image: String,
    },
    /// Write a version to a new file
    Export {
        /// IMAGE, IMAGE:CHANNEL, IMAGE@NUMBER or IMAGE@HASH
        image: String,
        /// The file; it must not exist
        #[arg(value_hint = ValueHint::FilePath)]
        file: PathBuf,
        /// raw, qcow2, vhdx or vmdk; all but raw need qemu-img
        #[arg(long, default_value = "raw", value_parser = ExportFormat::parse)]
        format: ExportFormat,
    },
    /// Remove an image, or one of its versions
    Remove {
        /// IMAGE, IMAGE:CHANNEL, IMAGE@NUMBER or IMAGE@HASH
        image: String,
    },
}

/// `headwater machine ...`.
#[derive(Debug, Subcommand)]
pub enum MachineCommand {
    /// Create a machine; it is not started
    Create {
        /// Its name: 1 to 63 of a-z, 0-9 and '-'
        name: String,
        /// IMAGE, IMAGE:CHANNEL, IMAGE@NUMBER or IMAGE@HASH
        image: String,
        /// The guest's host name [default: the machine's name]
        #[arg(long)]
        host_name: Option<String>,
        /// Write cache and size
        #[command(flatten)]
        machine: MachineArgs,
    },
    /// List all machines
    List,
    /// Show a machine, its disk's counters and its latest events
    Show {
        /// Its name
        name: String,
    },
    /// Change the limits of a machine's write cache: at once where it is on, and for its later starts
    #[command(group = clap::ArgGroup::new("limits").required(true).multiple(true))]
    Set {
        /// Its name
        name: String,
        /// The most memory that the write cache takes
        #[arg(long, value_name = "SIZE", value_parser = size, group = "limits")]
        ram: Option<u64>,
        /// The most disk space that the write cache takes
        #[arg(long, value_name = "SIZE", value_parser = size, group = "limits")]
        disk: Option<u64>,
    },
    /// Start machines, each on a pristine disk
    Start {
        /// Their names
        #[arg(required = true)]
        names: Vec<String>,
        /// Wait until the guests are up, at most so many seconds
        #[arg(long, value_name = "SECONDS", num_args = 0..=1, default_missing_value = "600")]
        wait: Option<u64>,
    },
    /// Stop machines: ask the guest, end it after 30 seconds, forget what it wrote
    Stop {
        /// Their names
        #[arg(required = true)]
        names: Vec<String>,
        /// End them at once
        #[arg(long)]
        force: bool,
    },
    /// Give machines their pristine disk; those that are on start again at once
    Reset {
        /// Their names
        #[arg(required = true)]
        names: Vec<String>,
        /// Wait until the guests are up, at most so many seconds
        #[arg(long, value_name = "SECONDS", num_args = 0..=1, default_missing_value = "600")]
        wait: Option<u64>,
    },
    /// Remove machines that are off
    Remove {
        /// Their names
        #[arg(required = true)]
        names: Vec<String>,
        /// End them first where they are on
        #[arg(long)]
        force: bool,
    },
    /// Connect the terminal to a machine's console (Ctrl-] leaves), or print what it printed
    Console {
        /// Its name
        name: String,
        /// Print what the console printed since the machine started, and end
        #[arg(long)]
        log: bool,
        /// Print it and go on until the machine is off
        #[arg(long)]
        follow: bool,
    },
    /// Run a command in a guest, through its agent; its exit code becomes ours
    Exec {
        /// The machine's name
        name: String,
        /// End the command after so many seconds
        #[arg(long, value_name = "SECONDS", default_value_t = 600)]
        timeout: u64,
        /// The command and its arguments
        #[arg(last = true, required = true)]
        command: Vec<String>,
    },
}

/// `headwater stats`.
#[derive(Debug, Args)]
pub struct StatsArgs {
    /// Only those of this machine
    pub machine: Option<String>,
    /// Again each second, with the rates of counters, until Ctrl-C
    #[arg(long)]
    pub watch: bool,
}

/// `headwater events`.
#[derive(Debug, Args)]
pub struct EventsArgs {
    /// Only those of one subject, for instance 'machine web-1'
    #[arg(long)]
    pub subject: Option<String>,
    /// At most so many
    #[arg(long, default_value_t = 100)]
    pub limit: u32,
}

fn size(text: &str) -> Result<u64, String> {
    headwater_block::size::parse(text)
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::CommandFactory;

    #[test]
    fn the_command_line_is_sound() {
        Cli::command().debug_assert();
    }

    #[test]
    fn defaults_are_those_of_the_api() {
        let cli = Cli::parse_from(["headwater", "run", "x.qcow2"]);
        let Command::Run(run) = cli.command else { panic!("not run") };
        assert_eq!(run.machine.cache_settings(), CacheSettings::default());
        assert_eq!(run.machine.memory, headwater_api::CreateMachine::default_memory_bytes());
        assert_eq!((run.count, run.machine.cpus), (1, headwater_api::CreateMachine::default_cpus()));
    }
}
