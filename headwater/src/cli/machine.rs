//! Subcommands and options of `headwater machine` and of `headwater catalog` (a catalog is a group of machines that
//! are made alike).

use std::path::PathBuf;

use clap::{Args, Subcommand, ValueHint};
use headwater_api::platform::{Display, Firmware, Network};
use headwater_api::{
    Batch, BootFrom, CacheSettings, DiskTransport, Hours, MachineSort, OnHostLoss, Problem, ResetOn,
    RollRequest,
};
use headwater_block::size;
use headwater_qemu::spec::MAX_CPUS;

use crate::caches::{LimitArgs, NewLimits};
use crate::cli::{CloudArgs, complete};
use crate::failure::invalid;

/// The write cache and the hardware of a machine.
#[derive(Debug, Args)]
pub struct MachineArgs {
    /// Its write cache
    #[command(flatten)]
    pub limits: LimitArgs,
    /// Its weight among the write caches of the host, 1 to 10000: while memory is short, a larger weight gets a
    /// larger share [default: 100]
    #[arg(long, value_name = "WEIGHT")]
    pub weight: Option<u32>,
    /// The guest's memory [default: 512M]
    #[arg(long, value_name = "SIZE", value_parser = size::parse)]
    pub memory: Option<u64>,
    /// The guest's processors [default: 1]
    #[arg(long, value_name = "COUNT", value_parser = processors())]
    pub cpus: Option<u32>,
    /// How the guest reaches its disk: vhost-user (memory shared with the disk process) or nbd (a socket) [default: vhost-user]
    #[arg(long, value_name = "HOW", value_parser = DiskTransport::parse)]
    pub transport: Option<DiskTransport>,
    /// The firmware: bios (SeaBIOS) or uefi (OVMF) [default: uefi if the image boots with UEFI only, or else bios]
    #[arg(long, value_name = "KIND", value_parser = Firmware::parse)]
    pub firmware: Option<Firmware>,
    /// Enable Secure Boot (selects --firmware uefi): only loaders that are signed with Microsoft's keys run
    #[arg(long, value_name = "YES", num_args = 0..=1, require_equals = true, default_missing_value = "true")]
    pub secure_boot: Option<bool>,
    /// Give the guest a TPM 2.0 (swtpm): it keeps its contents if the disk is persistent, or else starts empty at
    /// each start
    #[arg(long, value_name = "YES", num_args = 0..=1, require_equals = true, default_missing_value = "true")]
    pub tpm: Option<bool>,
    /// The guest's screen: none, or vnc (on a unix socket in the machine's directory) [default: none]
    #[arg(long, value_name = "HOW", value_parser = Display::parse)]
    pub display: Option<Display>,
    /// The guest's network: user (out through the host), or bridge:NAME (a port of this bridge; needs root or CAP_NET_ADMIN) [default: user]
    #[arg(long, value_name = "HOW")]
    pub network: Option<Network>,
    /// Give the guest a scratch disk of this size for swap and temporary files: empty at each start, never sealed; 0
    /// means none [default: none]
    #[arg(long, value_name = "SIZE", value_parser = size::parse)]
    pub scratch: Option<u64>,
    /// File with cloud-init user data for the guest (#cloud-config, a script, ...), of at most 4M
    #[arg(long, value_name = "FILE", value_hint = ValueHint::FilePath)]
    pub user_data: Option<PathBuf>,
}

impl MachineArgs {
    /// The firmware of these flags: UEFI if only Secure Boot is given.
    pub fn firmware(&self) -> Option<Firmware> {
        self.firmware.or((self.secure_boot == Some(true)).then_some(Firmware::Uefi))
    }

    /// The write cache of these flags; values that are not given are those of `base`.
    pub fn cache_settings(&self, base: CacheSettings) -> Result<CacheSettings, Problem> {
        let weight = self.weight.unwrap_or(base.weight);
        Ok(CacheSettings { weight, ..self.limits.settings(base)? })
    }
}

/// Accepts the possible counts of processors.
fn processors() -> clap::builder::RangedI64ValueParser<u32> {
    clap::value_parser!(u32).range(1..=i64::from(MAX_CPUS))
}

/// Personality strings: names and values that guests read.
#[derive(Debug, Args)]
pub struct PersonalityArgs {
    /// Give guests a string from their next boot on: a name of 1 to 250 characters, and a value of at most 1000; may be given several times
    #[arg(long, value_name = "NAME=VALUE", value_parser = name_and_value)]
    pub personality: Vec<(String, String)>,
    /// Take a string away; may be given several times
    #[arg(long, value_name = "NAME")]
    pub no_personality: Vec<String>,
}

impl PersonalityArgs {
    /// Whether a change is given.
    pub fn is_given(&self) -> bool {
        !self.personality.is_empty() || !self.no_personality.is_empty()
    }
}

fn name_and_value(text: &str) -> Result<(String, String), String> {
    let (name, value) = text.split_once('=').ok_or("write NAME=VALUE")?;
    Ok((name.to_owned(), value.to_owned()))
}

/// `headwater machine ...`.
#[derive(Debug, Subcommand)]
pub enum MachineCommand {
    /// Create a machine; it is not started
    Create {
        /// Its name: 1 to 63 of a-z, 0-9 and '-'
        name: String,
        /// IMAGE, IMAGE:CHANNEL, IMAGE@NUMBER or IMAGE@HASH
        #[arg(required_unless_present = "catalog", add = complete::images())]
        image: Option<String>,
        /// The catalog that it belongs to: the machine boots the catalog's image, and has the catalog's settings
        /// where no flag gives others
        #[arg(long, conflicts_with = "image", add = complete::catalogs())]
        catalog: Option<String>,
        /// The host that is to run it, as 'headwater node list' names it [default: the controller's own; of a catalog that
        /// keeps no machines ready, the one with the most free memory]
        #[arg(long, value_name = "HOST")]
        host: Option<String>,
        /// Keep its disk over stops, restarts and crashes; the machine stays on its version until a reset
        #[arg(long)]
        persistent: bool,
        /// The guest's host name [default: the machine's name]
        #[arg(long, value_name = "NAME")]
        host_name: Option<String>,
        /// What starts it: vm (the daemon starts a virtual machine) or network (somebody switches a computer on, which
        /// 'serve --boot' answers; without --catalog, the default is then --cache ram --ram 512M) [default: vm]
        #[arg(long, value_name = "FROM", value_parser = BootFrom::parse)]
        boot: Option<BootFrom>,
        /// The MAC address of its network card: 52:54:00:12:34:56. Needed with --boot network, where it is the card that the machine boots
        /// from [default: generated]
        #[arg(long, value_name = "ADDRESS")]
        mac: Option<String>,
        /// Write cache and size
        #[command(flatten)]
        machine: MachineArgs,
    },
    /// List all machines, or those that match a filter
    List {
        /// Only those that match all terms, such as state:running catalog:class version:old 'ram>80%' desk; ! before
        /// a term means "not" (instead of -, which would begin an option)
        filter: Vec<String>,
        /// Sort by: name, state, ram, disk, cache (RAM and disk together), iops or boot
        #[arg(long, value_name = "ORDER", default_value_t, value_parser = MachineSort::parse)]
        sort: MachineSort,
        /// The most machines to list
        #[arg(long, value_name = "COUNT")]
        limit: Option<u32>,
    },
    /// Show a machine, its disk's counters and its latest events
    Show {
        /// Its name
        #[arg(add = complete::machines())]
        name: String,
    },
    /// Change the limits of a machine's write cache (at once if the machine is on), its memory and processors
    /// while it is off, or the personality strings of its guest
    #[command(group = clap::ArgGroup::new("limits").required(true).multiple(true).args(["personality", "no_personality"]))]
    Set {
        /// Its name
        #[arg(add = complete::machines())]
        name: String,
        /// The new limits
        #[command(flatten)]
        limits: NewLimits,
        /// Its weight among the host's write caches while memory is short, 1 to 10000
        #[arg(long, value_name = "WEIGHT", group = "limits")]
        weight: Option<u32>,
        /// The guest's memory; only while the machine is off
        #[arg(long, value_name = "SIZE", value_parser = size::parse, group = "limits")]
        memory: Option<u64>,
        /// The guest's processors; only while the machine is off
        #[arg(long, value_name = "COUNT", value_parser = processors(), group = "limits")]
        cpus: Option<u32>,
        /// Strings that its guest reads
        #[command(flatten)]
        personality: PersonalityArgs,
    },
    /// Make a version of a machine's disk as it is now, while the machine keeps running
    Seal {
        /// Its name
        #[arg(add = complete::machines())]
        name: String,
        /// A line about the version, for people
        #[arg(long)]
        note: Option<String>,
        /// Also if the machine edits an image that got newer versions since: the new version does not have their
        /// changes
        #[arg(long)]
        over_newer: bool,
        /// Do not search the disk, and seal a machine that is off even if its SSH host key, machine-id or host name is on it;
        /// the version is marked as not generalised
        #[arg(long)]
        keep_identity: bool,
    },
    /// Start machines, each on a pristine disk, or on its persistent disk
    Start {
        /// The machines
        #[command(flatten)]
        which: Which,
        /// Record the requests that each machine sends to its disk, without their data, until it is off or its guest
        /// reboots. The file is DIR/recordings/NAME-N.rec in the daemon's data directory
        #[arg(long)]
        record: bool,
        /// Wait until the guests have booted, for this many seconds, or 600
        #[arg(long, value_name = "SECONDS", num_args = 0..=1, require_equals = true, default_missing_value = "600")]
        wait: Option<u64>,
    },
    /// Stop machines: ask the guest to shut down, end it after 30 seconds, and discard its changes unless its disk is
    /// persistent
    Stop {
        /// The machines
        #[command(flatten)]
        which: Which,
        /// End them at once, without asking the guests
        #[arg(long)]
        force: bool,
    },
    /// Give machines a pristine disk, also in place of a persistent disk; machines that are on start again at once
    Reset {
        /// The machines
        #[command(flatten)]
        which: Which,
        /// Wait until the guests have booted, for this many seconds, or 600
        #[arg(long, value_name = "SECONDS", num_args = 0..=1, require_equals = true, default_missing_value = "600")]
        wait: Option<u64>,
    },
    /// Remove machines that are off, with their persistent disks
    Remove {
        /// The machines
        #[command(flatten)]
        which: Which,
        /// End machines that are on, and remove them too
        #[arg(long)]
        force: bool,
    },
    /// Connect the terminal to a machine's console (Ctrl-] disconnects), or print what the guest wrote to it
    Console {
        /// Its name
        #[arg(add = complete::machines())]
        name: String,
        /// Print what the console printed since the machine started, and end
        #[arg(long)]
        log: bool,
        /// Print it and what follows until the machine is off
        #[arg(long)]
        follow: bool,
    },
    /// Save what a machine's display shows as a PNG
    Screenshot {
        /// Its name
        #[arg(add = complete::machines())]
        name: String,
        /// The file, which is replaced if it exists; - for standard output
        #[arg(value_hint = ValueHint::FilePath)]
        file: PathBuf,
    },
    /// Copy a file into a guest or out of it through the guest agent: one of the two is NAME:PATH
    Cp {
        /// The file: PATH, or NAME:/PATH
        from: String,
        /// The destination: PATH, or NAME:/PATH; in a directory the file keeps its name
        to: String,
    },
    /// Give machines that are off a new SSH host key, and print its public half; the guests get the key at their next
    /// boot
    Rotate {
        /// The machines
        #[command(flatten)]
        which: Which,
    },
    /// Have guests discard the blocks of removed files (fstrim, through the guest agents): the blocks use space in
    /// their write caches until then
    Trim {
        /// The machines
        #[command(flatten)]
        which: Which,
    },
    /// Run a command in a guest through the guest agent; its exit code becomes that of this command, and Ctrl-C ends
    /// it
    Exec {
        /// The machine's name
        #[arg(add = complete::machines())]
        name: String,
        /// End the command after this many seconds
        #[arg(long, value_name = "SECONDS", default_value_t = 600)]
        timeout: u64,
        /// Pass standard input to the command, read to its end: at most 1 MiB. Without the flag, the command gets an
        /// empty input
        #[arg(short = 'i', long)]
        stdin: bool,
        /// The command and its arguments
        #[arg(last = true, required = true)]
        command: Vec<String>,
    },
}

/// The machines of a command: by name, by catalog, or by filter.
#[derive(Debug, Args)]
pub struct Which {
    /// Their names
    #[arg(required_unless_present_any = ["catalog", "filter"], add = complete::machines())]
    pub names: Vec<String>,
    /// All machines of this catalog
    #[arg(long, value_name = "CATALOG", conflicts_with = "names", add = complete::catalogs())]
    pub catalog: Option<String>,
    /// All machines that match, such as 'state:running version:old -name:test-*'
    #[arg(long, value_name = "FILTER", conflicts_with = "names", allow_hyphen_values = true)]
    pub filter: Option<String>,
    /// Do nothing unless exactly this many machines match
    #[arg(long, value_name = "COUNT", conflicts_with = "names")]
    pub expect: Option<u64>,
}

/// `headwater catalog roll`.
#[derive(Debug, Args)]
pub struct RollArgs {
    /// The catalog
    #[arg(add = complete::catalogs())]
    pub name: String,
    /// The version: IMAGE@NUMBER, or IMAGE:CHANNEL for the one that it points to now
    #[arg(long, value_name = "VERSION", add = complete::images())]
    pub to: String,
    /// How many machines are moved first; the others follow only if these are healthy
    #[arg(long, value_name = "COUNT", default_value_t = RollRequest::default_canary())]
    pub canary: u32,
    /// How many of the others are moved at once: a number, or a share such as 10%
    #[arg(long, value_name = "BATCH", default_value_t, value_parser = Batch::parse)]
    pub batch: Batch,
    /// How long to wait after each batch, such as 60s or 5m
    #[arg(long, value_name = "TIME", value_parser = super::task::span)]
    pub pause: Option<u64>,
    /// A shell command in the guest that ends with 0 if the machine is healthy; without it, a machine that is up is healthy
    #[arg(long, value_name = "COMMAND")]
    pub health: Option<String>,
    /// How long that command may take
    #[arg(long, value_name = "TIME", default_value = "60s", value_parser = super::task::span)]
    pub health_timeout: u64,
    /// How long a machine may take until it is up
    #[arg(long, value_name = "TIME", default_value = "10m", value_parser = super::task::span)]
    pub boot_timeout: u64,
    /// How many machines besides the canaries may fail before all are moved back
    #[arg(long, value_name = "COUNT", default_value_t = 0)]
    pub max_failures: u32,
    /// Move no machine before this time: 2026-12-24T03:00Z, or +90m, +12h, +7d from now
    #[arg(long, value_name = "TIME")]
    pub at: Option<String>,
    /// Move machines in these hours of the week only, such as 'sun 02:00-05:00 Europe/Berlin' [default zone: that of the daemon's host]
    #[arg(long, value_name = "HOURS", value_parser = Hours::parse)]
    pub window: Option<Hours>,
    /// If somebody is logged in to a machine, restart it when nobody is, or after this time, such as 30m [default: restart it at once]
    #[arg(long, value_name = "TIME", value_parser = super::task::span)]
    pub wait_idle: Option<u64>,
    /// Show users of such a machine this message when the machine begins to wait, and again when more users log in
    #[arg(long, value_name = "TEXT", requires = "wait_idle")]
    pub message: Option<String>,
    /// After this time no machine waits any more, and a machine that is in use is not restarted: it takes the version at its next boot
    #[arg(long, value_name = "TIME", value_parser = super::task::span, requires = "wait_idle")]
    pub deadline: Option<u64>,
    /// Return at once; 'headwater task wait' follows the roll
    #[arg(long)]
    pub no_wait: bool,
}

/// `headwater catalog scheme ...`.
#[derive(Debug, Subcommand)]
pub enum SchemeVersionCommand {
    /// List the versions, who made them, and how many machines have each
    List {
        /// The catalog
        #[arg(add = complete::catalogs())]
        catalog: String,
    },
    /// Show the settings of a version
    Show {
        /// The catalog
        #[arg(add = complete::catalogs())]
        catalog: String,
        /// The number of the version [default: the newest]
        version: Option<u32>,
    },
    /// Show the settings that differ between two versions
    Diff {
        /// The catalog
        #[arg(add = complete::catalogs())]
        catalog: String,
        /// The number of a version
        from: u32,
        /// The number of the other version [default: the newest]
        to: Option<u32>,
    },
    /// Make a new version with the settings of an earlier one; machines take it when the controller next starts them
    Revert {
        /// The catalog
        #[arg(add = complete::catalogs())]
        catalog: String,
        /// The number of the version
        version: u32,
    },
}

/// `headwater catalog ...`.
#[derive(Debug, Subcommand)]
pub enum CatalogCommand {
    /// Create a catalog, and with --count or --machines its machines; 'machine create NAME --catalog CATALOG' adds single ones
    #[command(group = clap::ArgGroup::new("made").args(["count", "machines"]))]
    Create {
        /// Its name: 1 to 63 of a-z, 0-9 and '-'; no machine has it
        name: String,
        /// What its machines boot: IMAGE, IMAGE:CHANNEL, IMAGE@NUMBER or IMAGE@HASH
        #[arg(add = complete::images())]
        image: String,
        /// Keep the disks of its machines over stops, restarts and crashes
        #[arg(long)]
        persistent: bool,
        /// Create this many machines
        #[arg(long, value_name = "COUNT")]
        count: Option<u32>,
        /// Create the machines of this CSV file, whose first line names its columns: 'name', and any of 'mac', 'address', 'gateway', 'dns'
        #[arg(long, value_name = "FILE", value_hint = ValueHint::FilePath)]
        machines: Option<PathBuf>,
        /// The names of machines that are created by number: '#' signs stand for the digits [default: NAME-##]
        #[arg(long = "name", value_name = "RULE")]
        name_rule: Option<String>,
        /// The number of the first machine
        #[arg(long, value_name = "NUMBER", default_value_t = 1)]
        first: u32,
        /// Keep this many machines on, with pristine disks, for 'catalog claim'
        #[arg(long, value_name = "COUNT", default_value_t = 0, conflicts_with = "persistent")]
        keep_ready: u32,
        /// The hours at which machines are kept ready
        #[command(flatten)]
        hours: ReadyHoursArgs,
        /// Start the machines that are created
        #[arg(long, requires = "made")]
        start: bool,
        /// The policy for machines whose host is lost: wait, or restart, which starts them on other hosts. With restart, a host ends them
        /// if it does not hear the controller for 30 s ('serve --node-lease')
        #[arg(long, value_name = "WHAT", default_value = "wait", value_parser = OnHostLoss::parse)]
        on_host_loss: OnHostLoss,
        /// Also remove this file in guests of the catalog's machines whose maintenance sessions are sealed, in addition to
        /// the machine's identity: an absolute path in the guest, which may have wildcards; may be given several times
        #[arg(long, value_name = "PATH", value_parser = super::guest_path)]
        seal_removes: Vec<String>,
        /// Write cache and size of each machine
        #[command(flatten)]
        machine: MachineArgs,
        /// Machines in a cloud
        #[command(flatten)]
        cloud: Box<CloudArgs>,
    },
    /// List all catalogs
    List,
    /// Show a catalog and its machines
    Show {
        /// Its name
        #[arg(add = complete::catalogs())]
        name: String,
    },
    /// Say how much RAM and disk the write caches of its machines need, by what they took in their runs on this host
    Advice {
        /// Its name
        #[arg(add = complete::catalogs())]
        name: String,
    },
    /// Change what a catalog's machines boot, their settings (used when the controller next starts them), how many are ready, what a
    /// seal removes, or the policy for lost hosts; an option that is not given changes nothing
    #[command(group = clap::ArgGroup::new("change").required(true).multiple(true).args([
        "from", "stop_idle", "cache", "ram", "disk", "weight", "memory", "cpus", "transport", "firmware", "secure_boot", "tpm",
        "display", "network", "scratch", "user_data", "personality", "no_personality",
    ]))]
    #[command(mut_args(super::without_default))]
    Set {
        /// Its name
        #[arg(add = complete::catalogs())]
        name: String,
        /// IMAGE, IMAGE:CHANNEL, IMAGE@NUMBER or IMAGE@HASH
        #[arg(add = complete::images(), group = "change")]
        image: Option<String>,
        /// Also remove this file in guests of the catalog's machines whose maintenance sessions are sealed: an absolute path
        /// in the guest, which may have wildcards; may be given several times. The given paths replace the earlier ones
        #[arg(long, value_name = "PATH", value_parser = super::guest_path, group = "change")]
        seal_removes: Vec<String>,
        /// Remove no additional paths any more
        #[arg(long, conflicts_with = "seal_removes", group = "change")]
        seal_removes_nothing: bool,
        /// Keep this many machines on, with pristine disks, for 'catalog claim'
        #[arg(long, value_name = "COUNT", group = "change")]
        keep_ready: Option<u32>,
        /// The hours at which machines are kept ready
        #[command(flatten)]
        hours: ReadyHoursArgs,
        /// The policy for machines whose host is lost: wait, or restart, which starts them on other hosts. With restart, a host ends them
        /// if it does not hear the controller for 30 s ('serve --node-lease')
        #[arg(long, value_name = "WHAT", value_parser = OnHostLoss::parse, group = "change")]
        on_host_loss: Option<OnHostLoss>,
        /// Keep machines ready at all hours again
        #[arg(long, conflicts_with = "from", group = "change")]
        always: bool,
        /// Give a machine another SSH host key when it boots and its key is this old or older, such as 30d, or never
        #[arg(long, value_name = "TIME", value_parser = idle_span, group = "change")]
        rotate_after: Option<u64>,
        /// Give their guests no user data any more
        #[arg(long, conflicts_with = "user_data", group = "change")]
        no_user_data: bool,
        /// Strings that their guests read
        #[command(flatten)]
        personality: PersonalityArgs,
        /// A new version of their settings
        #[command(flatten)]
        machine: Box<MachineArgs>,
    },
    /// The versions of the settings of a catalog's machines, its scheme
    #[command(subcommand)]
    Scheme(SchemeVersionCommand),
    /// Give a machine that is on and fresh to somebody, and print its name; nobody else gets it before it was reset
    Claim {
        /// The catalog
        #[arg(add = complete::catalogs())]
        catalog: String,
        /// The holder of the claim: a person, a job
        #[arg(long = "for", value_name = "HOLDER")]
        holder: String,
        /// How long the claim lasts, such as 30m or 8h [default: until the claim is released or the guest shuts down]
        #[arg(long, value_name = "TIME", value_parser = super::task::span)]
        ttl: Option<u64>,
        /// How long to wait for a machine if none is ready; a machine that is off is started
        #[arg(long, value_name = "TIME", value_parser = super::task::span)]
        wait: Option<u64>,
        /// An idempotency key: a repeated command with the same key gets the same claim
        #[arg(long)]
        key: Option<String>,
        /// Create a secret for the guest and the holder, and print it on a second line. The guest needs the guest
        /// agent of QEMU, and finds the secret in /run/headwater/claim.json
        #[arg(long)]
        secret: bool,
        /// End the claim when the guest is off (shutdown), or also when its last user has logged off (logoff)
        #[arg(long, value_name = "WHEN", default_value = "shutdown", value_parser = ResetOn::parse)]
        reset_on: ResetOn,
    },
    /// List the claims: who has which machine
    Claims {
        /// Only those of this catalog
        #[arg(add = complete::catalogs())]
        catalog: Option<String>,
    },
    /// End a claim: its machine is reset, or switched off if enough others are ready
    Release {
        /// The machine, or the id of the claim
        #[arg(add = complete::machines())]
        claim: String,
    },
    /// Set the number of a catalog's machines: creates the missing ones, or removes surplus ones, first those that
    /// are off. With --machines, adds the machines of a file
    Scale {
        /// Its name
        #[arg(add = complete::catalogs())]
        name: String,
        /// The new number of machines
        #[arg(required_unless_present = "machines", conflicts_with = "machines")]
        count: Option<u32>,
        /// Add the machines of this CSV file, whose first line names its columns: 'name', and any of 'mac', 'address', 'gateway', 'dns'
        #[arg(long, value_name = "FILE", value_hint = ValueHint::FilePath)]
        machines: Option<PathBuf>,
        /// Start the machines that are created, and with --machines those of the file that exist already
        #[arg(long)]
        start: bool,
        /// If there are not enough others, also remove claimed and pinned machines, and machines with a persistent disk;
        /// machines with a maintenance session always stay
        #[arg(long)]
        force: bool,
    },
    /// Move a catalog's machines to a version: canaries first, then batches; moves all back if too many are not
    /// healthy
    Roll(RollArgs),
    /// Remove a catalog that has no machines
    Remove {
        /// Its name
        #[arg(add = complete::catalogs())]
        name: String,
    },
}

/// The hours at which machines of a catalog are kept ready.
#[derive(Clone, Debug, Args)]
pub struct ReadyHoursArgs {
    /// Keep machines ready from this time of day, such as 07:00
    #[arg(long, value_name = "HH:MM", requires = "to")]
    pub from: Option<String>,
    /// Keep them ready until this time of day, such as 19:00; on the next day if it is not later than --from
    #[arg(long, value_name = "HH:MM", requires = "from")]
    pub to: Option<String>,
    /// The days: mon-fri, sat,sun or daily
    #[arg(long, value_name = "DAYS", default_value = "daily", requires = "from")]
    pub days: String,
    /// The time zone of these hours, such as Europe/Berlin [default: that of the daemon's host]
    #[arg(long, value_name = "ZONE", requires = "from")]
    pub zone: Option<String>,
    /// Switch an unclaimed machine off after it has been surplus (beyond --keep-ready, or outside of the hours) for
    /// this time, such as 15m, or never [default: never; 15m with --from]
    #[arg(long, value_name = "TIME", value_parser = idle_span)]
    pub stop_idle: Option<u64>,
}

impl ReadyHoursArgs {
    /// The hours of these flags. `None`: no hours are given.
    pub fn hours(&self) -> anyhow::Result<Option<Hours>> {
        let Some((from, to)) = self.from.as_ref().zip(self.to.as_ref()) else { return Ok(None) };
        Hours::new(&self.days, from, to, self.zone.as_deref()).map(Some).map_err(invalid)
    }
}

/// Accepts a duration, or `never`.
fn idle_span(text: &str) -> Result<u64, String> {
    match text {
        "never" | "0" => Ok(0),
        text => super::task::span(text),
    }
}
