//! The command line.

use std::net::SocketAddr;
use std::path::PathBuf;

use clap::{Args, Parser, Subcommand, ValueEnum, ValueHint};
use headwater_api::{
    CacheMode, CacheSettings, Channel, DiskTransport, ExportFormat, Problem, ProblemKind, SourceFormat,
};

use crate::caches::{CacheArgs, unfit_limit};
use crate::cmd::attach::DetachArgs;
use crate::cmd::cache::CacheCommand;
use crate::cmd::export::ExportArgs;
use crate::cmd::serve_nbd::ServeNbdArgs;
use crate::cmd::store::{OfferArgs, StoreCommand};
use crate::stores::Credentials;
use crate::streaming::StreamArgs;

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
    /// Create, start, stop, reset, seal and remove machines
    #[command(subcommand)]
    Machine(MachineCommand),
    /// Create, show and remove catalogs: machines that are made alike and boot the same
    #[command(subcommand)]
    Catalog(CatalogCommand),
    /// Copy versions between stores, serve, check and repair a store, without a daemon
    #[command(subcommand)]
    Store(StoreCommand),
    /// Show what the daemon and its host do
    Status,
    /// Show the metrics of the host and of machines that are on
    Stats(StatsArgs),
    /// Show who changed what, and when
    Events(EventsArgs),
    /// Serve one volume over NBD, vhost-user, iSCSI or as a file in the foreground, or one for each of many machines, without
    /// a daemon
    Export(ExportArgs),
    /// Make one volume a block device of this kernel, until Ctrl-C, SIGTERM or 'headwater detach'
    #[command(mut_group("front-end", |group| group.required(false)))]
    Attach(ExportArgs),
    /// Show and change the limits of write caches of exports and attached devices that run, without a daemon
    #[command(subcommand)]
    Cache(CacheCommand),
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
    /// Where writes go: ram, ram+disk or disk [default: ram+disk]
    #[arg(long, value_name = "MODE", value_parser = CacheMode::parse)]
    pub cache: Option<CacheMode>,
    /// The most memory that the write cache takes; not with --cache disk [default: 64M]
    #[arg(long, value_name = "SIZE", value_parser = size)]
    pub ram: Option<u64>,
    /// The most disk space that the write cache takes; not with --cache ram [default: 10G]
    #[arg(long, value_name = "SIZE", value_parser = size)]
    pub disk: Option<u64>,
    /// Its weight among the host's write caches while memory is short, 1 to 10000 [default: 100]
    #[arg(long, value_name = "WEIGHT")]
    pub weight: Option<u32>,
    /// The guest's memory [default: 512M]
    #[arg(long, value_name = "SIZE", value_parser = size)]
    pub memory: Option<u64>,
    /// The guest's processors [default: 1]
    #[arg(long, value_name = "COUNT", value_parser = clap::value_parser!(u32).range(1..))]
    pub cpus: Option<u32>,
    /// How the guest reaches its disk: vhost-user (memory shared with the daemon) or nbd (a socket) [default: vhost-user]
    #[arg(long, value_name = "HOW", value_parser = DiskTransport::parse)]
    pub transport: Option<DiskTransport>,
    /// File with cloud-init user data for the guest (#cloud-config, a script, ...)
    #[arg(long, value_name = "FILE", value_hint = ValueHint::FilePath)]
    pub user_data: Option<PathBuf>,
}

impl MachineArgs {
    /// The write cache as the API has it: what is not given is as in `base`. A limit that the mode does not have is refused.
    pub fn cache_settings(&self, base: CacheSettings) -> anyhow::Result<CacheSettings> {
        let mode = self.cache.unwrap_or(base.mode);
        if let Some((limit, why)) = unfit_limit(mode, self.ram, self.disk) {
            let message = format!("{limit} was given, and the cache mode '{mode}' {why}");
            let advice = format!("leave {limit} out, or give --cache ram+disk");
            return Err(Problem::new(ProblemKind::Invalid, message).advise(advice).into());
        }
        Ok(CacheSettings {
            mode,
            ram_bytes: self.ram.unwrap_or(base.ram_bytes),
            disk_bytes: self.disk.unwrap_or(base.disk_bytes),
            weight: self.weight.unwrap_or(base.weight),
            persistent: base.persistent,
        })
    }
}

/// `headwater run`.
#[derive(Debug, Args)]
pub struct RunArgs {
    /// A raw, qcow2, VHD, VHDX or VMDK file, an NBD URI, or an image of the store (IMAGE, IMAGE@VERSION)
    #[arg(value_name = "FILE|IMAGE", value_hint = ValueHint::FilePath)]
    pub source: String,
    /// Allow a qcow2 image backing files outside of its own directory, and devices: whatever it names is read
    #[arg(long)]
    pub backing: bool,
    /// How many machines
    #[arg(short = 'n', long, value_name = "COUNT", default_value_t = 1,
          value_parser = clap::value_parser!(u32).range(1..=1000))]
    pub count: u32,
    /// Write cache and size of each machine
    #[command(flatten)]
    pub machine: MachineArgs,
    /// Take images from this store in place of DIR/store: servers that offer one (https://HOST[,https://HOST..]),
    /// s3://BUCKET/PREFIX, or a directory
    #[arg(long, visible_alias = "store", value_name = "STORE")]
    pub from: Option<String>,
    /// Token and authorities of the servers
    #[command(flatten)]
    pub credentials: Credentials,
    /// How images are read
    #[command(flatten)]
    pub stream: StreamArgs,
    /// What the write caches of all machines have in common
    #[command(flatten)]
    pub caches: CacheArgs,
}

/// `headwater serve`.
#[derive(Debug, Args)]
pub struct ServeArgs {
    /// Also listen on a TCP address of the loopback interface, for instance 127.0.0.1:8080; its clients send
    /// 'Authorization: Bearer TOKEN' with the token of the file DIR/api.token, which is made for it
    #[arg(long, value_name = "ADDR")]
    pub listen: Option<SocketAddr>,
    /// Keep images in this store in place of DIR/store: a directory, or s3://BUCKET/PREFIX[?endpoint=URL] with
    /// the keys of AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY; or read them from servers that offer a store,
    /// https://HOST[,https://HOST..]
    #[arg(long, visible_alias = "from", value_name = "STORE")]
    pub store: Option<String>,
    /// Token and authorities of the servers
    #[command(flatten)]
    pub credentials: Credentials,
    /// How images on other hosts are read
    #[command(flatten)]
    pub stream: StreamArgs,
    /// Also offer the store to others over HTTP at this address, for reading; anything but loopback needs TLS
    /// and tokens
    #[arg(long, value_name = "ADDR")]
    pub store_listen: Option<SocketAddr>,
    /// Certificate, key and tokens of that
    #[command(flatten)]
    pub offer: OfferArgs,
    /// The NBD server
    #[command(flatten)]
    pub nbd: ServeNbdArgs,
    /// Check all versions in the background, at so many bytes a second
    #[arg(long, value_name = "SIZE", value_parser = size)]
    pub scrub: Option<u64>,
    /// Repair what the check finds damaged from this store or server, if it has it; may be given several times
    #[arg(long, value_name = "STORE", requires = "scrub")]
    pub repair_from: Vec<String>,
    /// What the write caches of all machines have in common
    #[command(flatten)]
    pub caches: CacheArgs,
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
        /// The file's format: raw, qcow2, vhd (or vpc), vhdx or vmdk [default: what its bytes look like]. Say raw for a raw
        /// disk that a guest has written which is not trusted: its bytes may look like an image that names files of the host
        #[arg(long, value_parser = SourceFormat::parse)]
        format: Option<SourceFormat>,
        /// Allow a qcow2 image backing files outside of its own directory, and devices: whatever it names is read
        #[arg(long)]
        backing: bool,
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
    /// Have a machine, or all of a catalog, boot one version, whatever the channels say
    Pin {
        /// The machine or catalog
        #[arg(value_name = "MACHINE|CATALOG")]
        name: String,
        /// IMAGE@NUMBER or IMAGE@HASH
        image: String,
    },
    /// Let a machine, or all of a catalog, follow its image again
    Unpin {
        /// The machine or catalog
        #[arg(value_name = "MACHINE|CATALOG")]
        name: String,
    },
    /// Change an image on a machine: it boots the newest version on a private disk that is kept until seal or discard
    Edit {
        /// IMAGE
        image: String,
        /// The machine; it must be off
        #[arg(long)]
        machine: String,
    },
    /// Make a version of what was changed since edit; the machine must be off
    Seal {
        /// IMAGE
        image: String,
        /// A line about the version, for people
        #[arg(long)]
        note: Option<String>,
        /// Also where the image has newer versions, whose changes are not in it then
        #[arg(long)]
        over_newer: bool,
    },
    /// Forget what was changed since edit; the machine must be off
    Discard {
        /// IMAGE
        image: String,
    },
    /// Take a version out of use: it is not the newest any more and cannot be promoted
    Retire {
        /// IMAGE@NUMBER or IMAGE@HASH
        image: String,
        /// Bring it back
        #[arg(long)]
        undo: bool,
    },
    /// Show what changed between two versions: bytes, and files of ext, FAT and NTFS file systems
    Diff {
        /// The older one: IMAGE, IMAGE:CHANNEL, IMAGE@NUMBER or IMAGE@HASH
        from: String,
        /// The newer one
        to: String,
    },
    /// Show, record, merge and remove a version's boot trace: what its boots read first, and later ones have ahead
    #[command(subcommand)]
    Trace(TraceCommand),
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
    /// Read all of a version and compare it with its hashes; damage is told with the files and machines that it touches
    Verify {
        /// IMAGE, IMAGE:CHANNEL, IMAGE@NUMBER or IMAGE@HASH
        image: String,
        /// Repair what is damaged from this store or server, if it has it; may be given several times. Servers are
        /// shown the token that the daemon was started with
        #[arg(long, value_name = "STORE")]
        repair_from: Vec<String>,
    },
    /// Write a version to a new file
    Export {
        /// IMAGE, IMAGE:CHANNEL, IMAGE@NUMBER or IMAGE@HASH
        image: String,
        /// The file; it must not exist, and - is refused: the daemon writes it
        #[arg(value_hint = ValueHint::FilePath)]
        file: PathBuf,
        /// raw, qcow2, vhdx or vmdk; the last two need qemu-img [default: the file's extension where it is one of these, else raw]
        #[arg(long, value_parser = ExportFormat::parse)]
        format: Option<ExportFormat>,
    },
    /// Remove an image, or one of its versions
    Remove {
        /// IMAGE, IMAGE:CHANNEL, IMAGE@NUMBER or IMAGE@HASH
        image: String,
    },
}

/// `headwater image trace ...`.
#[derive(Debug, Subcommand)]
pub enum TraceCommand {
    /// Show how many boots it was made from, what it holds, and where it is kept
    Show {
        /// IMAGE, IMAGE:CHANNEL, IMAGE@NUMBER or IMAGE@HASH
        image: String,
    },
    /// Boot the version once, on a machine that is made for it and removed again, and record what it reads
    Record {
        /// IMAGE, IMAGE:CHANNEL, IMAGE@NUMBER or IMAGE@HASH
        image: String,
        /// Go on so long after the guest is up, for what starts late; two minutes are recorded at most
        #[arg(long, value_name = "SECONDS", default_value_t = 0)]
        after: u64,
        /// Size of the machine
        #[command(flatten)]
        machine: MachineArgs,
    },
    /// Take in boot traces that other hosts saved
    Merge {
        /// IMAGE, IMAGE:CHANNEL, IMAGE@NUMBER or IMAGE@HASH
        image: String,
        /// What 'trace save' wrote there
        #[arg(required = true, value_name = "FILE", value_hint = ValueHint::FilePath)]
        files: Vec<PathBuf>,
    },
    /// Write the boot trace to a file, for another host to merge
    Save {
        /// IMAGE, IMAGE:CHANNEL, IMAGE@NUMBER or IMAGE@HASH
        image: String,
        /// The file; it must not exist
        #[arg(value_hint = ValueHint::FilePath)]
        file: PathBuf,
    },
    /// Forget the boot trace; the next boots are recorded anew
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
        #[arg(required_unless_present = "catalog")]
        image: Option<String>,
        /// The catalog that it belongs to: it boots what that says, and what is not given is as there
        #[arg(long, conflicts_with = "image")]
        catalog: Option<String>,
        /// Keep its disk over stops, restarts and crashes; it stays on its version until a reset
        #[arg(long)]
        persistent: bool,
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
        /// Its weight among the host's write caches while memory is short, 1 to 10000
        #[arg(long, value_name = "WEIGHT", group = "limits")]
        weight: Option<u32>,
    },
    /// Make a version of a machine's disk as it is now, while the machine goes on
    Seal {
        /// Its name
        name: String,
        /// A line about the version, for people
        #[arg(long)]
        note: Option<String>,
        /// Also where the machine edits an image that has newer versions, whose changes are not in it then
        #[arg(long)]
        over_newer: bool,
    },
    /// Start machines, each on a pristine disk, or on its own where that is kept
    Start {
        /// Their names
        #[arg(required = true)]
        names: Vec<String>,
        /// Wait until the guests are up, at most so many seconds
        #[arg(long, value_name = "SECONDS", num_args = 0..=1, default_missing_value = "600")]
        wait: Option<u64>,
    },
    /// Stop machines: ask the guest, end it after 30 seconds, forget what it wrote unless its disk is kept
    Stop {
        /// Their names
        #[arg(required = true)]
        names: Vec<String>,
        /// End them at once
        #[arg(long)]
        force: bool,
    },
    /// Give machines a pristine disk, also those whose disk is kept; those that are on start again at once
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
    /// Run a command in a guest, through its agent; its exit code becomes ours, and Ctrl-C ends it
    Exec {
        /// The machine's name
        name: String,
        /// End the command after so many seconds
        #[arg(long, value_name = "SECONDS", default_value_t = 600)]
        timeout: u64,
        /// Give the command our standard input, read to its end: at most 1 MiB. Without it, it reads nothing
        #[arg(short = 'i', long)]
        stdin: bool,
        /// The command and its arguments
        #[arg(last = true, required = true)]
        command: Vec<String>,
    },
}

/// `headwater catalog ...`.
#[derive(Debug, Subcommand)]
pub enum CatalogCommand {
    /// Create a catalog; 'machine create NAME --catalog CATALOG' adds machines
    Create {
        /// Its name: 1 to 63 of a-z, 0-9 and '-'; no machine has it
        name: String,
        /// What its machines boot: IMAGE, IMAGE:CHANNEL, IMAGE@NUMBER or IMAGE@HASH
        image: String,
        /// Keep its machines' disks over stops, restarts and crashes
        #[arg(long)]
        persistent: bool,
        /// Write cache and size of each machine
        #[command(flatten)]
        machine: MachineArgs,
    },
    /// List all catalogs
    List,
    /// Show a catalog and its machines
    Show {
        /// Its name
        name: String,
    },
    /// Have a catalog's machines boot something else from their next boot on
    Set {
        /// Its name
        name: String,
        /// IMAGE, IMAGE:CHANNEL, IMAGE@NUMBER or IMAGE@HASH
        image: String,
    },
    /// Remove a catalog that has no machines
    Remove {
        /// Its name
        name: String,
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
    /// Only those older than the event with this id, which --json shows
    #[arg(long, value_name = "ID")]
    pub before: Option<i64>,
    /// At most so many, the newest; the daemon keeps the newest 100,000
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
        let default = CacheSettings::default();
        assert_eq!((run.machine.cache_settings(default).unwrap(), run.count), (default, 1));
        // The help texts say what the API does.
        let help = Cli::command().find_subcommand_mut("run").unwrap().render_long_help().to_string();
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
