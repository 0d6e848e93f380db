//! Subcommands and options of `headwater image`: images, their versions and channels, maintenance sessions, boot traces,
//! and publishing to Azure. `crate::cmd::image` executes them.

use std::path::PathBuf;

use clap::{Subcommand, ValueHint};
use headwater_api::{Channel, ExportFormat, SourceFormat};

use crate::cli::{MachineArgs, complete};
use crate::streaming;

/// `headwater image ...`.
#[derive(Debug, Subcommand)]
pub enum ImageCommand {
    /// Import a raw, qcow2, VHD, VHDX or VMDK file, or an NBD export, as a new version
    Import {
        /// A file, - for standard input, or nbd://HOST[:PORT]/NAME, nbd+unix:///NAME?socket=PATH, or with TLS
        /// nbds://HOST[:PORT]/NAME[?tls-certificates=DIR] or nbds+unix://..; tls-hostname=NAME is the name in the server's certificate
        #[arg(value_name = "FILE|URI", value_hint = ValueHint::FilePath)]
        source: String,
        /// The image's name [default: the file's name without its extension]
        #[arg(long)]
        name: Option<String>,
        /// A line about the version, for people
        #[arg(long)]
        note: Option<String>,
        /// The file's format: raw, qcow2, vhd (or vpc), vhdx or vmdk [default: detected from its first bytes]. Give
        /// raw for a raw disk that an untrusted guest has written: its bytes may look like an image that names files
        /// of the host
        #[arg(long, value_parser = SourceFormat::parse)]
        format: Option<SourceFormat>,
        /// Allow a qcow2 image to have devices as backing files, or files outside of its own directory: whatever it
        /// names is read
        #[arg(long)]
        backing: bool,
        /// Size of the disk's sectors: 512 or 4096 [default: from its partition table, or else from the file, device
        /// or server]
        #[arg(long = "sector-size", value_name = "BYTES", value_parser = super::sector_bytes)]
        sector_bytes: Option<u32>,
    },
    /// Copy versions from another store to the daemon's store, where each keeps its number, while machines run; data
    /// that is there already is not copied again. Without names, all versions and the channels are copied
    Pull {
        /// A directory, s3://BUCKET/PREFIX[?endpoint=URL], or servers: https://HOST[,https://HOST..]. The daemon
        /// opens it with its own keys for S3, or with its --token and --ca if the servers were named when it was
        /// started, as with --repair-from
        #[arg(value_name = "STORE")]
        source: String,
        /// IMAGE, IMAGE:CHANNEL, IMAGE@NUMBER or IMAGE@HASH of that store [default: all, with the channels]
        images: Vec<String>,
    },
    /// List all images
    List,
    /// List an image's versions: channels, state, author, machines that run each
    Versions {
        /// IMAGE
        #[arg(add = complete::images())]
        image: String,
    },
    /// Point a channel to a version; machines boot it at their next boot
    Promote {
        /// IMAGE@NUMBER or IMAGE@HASH; with --cancel: only IMAGE
        #[arg(add = complete::images())]
        image: String,
        /// test or production
        #[arg(value_parser = Channel::parse)]
        channel: Channel,
        /// When: 2026-12-24T03:00Z (UTC), or +90m, +12h, +7d from now
        #[arg(long, value_name = "TIME", conflicts_with = "cancel")]
        at: Option<String>,
        /// Cancel the scheduled promotion of this channel
        #[arg(long)]
        cancel: bool,
        /// To production even if the version is not generalised: it may contain a machine's private key, which
        /// everybody who reads the store then has
        #[arg(long, conflicts_with = "cancel")]
        force: bool,
    },
    /// Point a channel to the version before its last promotion
    Revert {
        /// IMAGE
        #[arg(add = complete::images())]
        image: String,
        /// test or production
        #[arg(value_parser = Channel::parse)]
        channel: Channel,
    },
    /// Make a machine, or all machines of a catalog, boot one version, whatever the channels say
    Pin {
        /// The machine or catalog
        #[arg(value_name = "MACHINE|CATALOG", add = complete::machines_and_catalogs())]
        name: String,
        /// IMAGE@NUMBER or IMAGE@HASH
        #[arg(add = complete::images())]
        image: String,
    },
    /// Remove the pin: a machine, or all machines of a catalog, follow the image again
    Unpin {
        /// The machine or catalog
        #[arg(value_name = "MACHINE|CATALOG", add = complete::machines_and_catalogs())]
        name: String,
    },
    /// Begin a maintenance session: a machine boots the newest version that is not retired, on a private disk, until seal or
    /// discard
    Edit {
        /// IMAGE
        #[arg(add = complete::images())]
        image: String,
        /// The machine; it must be off
        #[arg(long, add = complete::machines())]
        machine: String,
    },
    /// Make a version of a maintenance session's disk. If the machine is on, its identity is removed in its guest,
    /// and it is switched off
    Seal {
        /// IMAGE
        #[arg(add = complete::images())]
        image: String,
        /// A line about the version, for people
        #[arg(long)]
        note: Option<String>,
        /// Seal even if the image has newer versions, whose changes are then missing
        #[arg(long)]
        over_newer: bool,
        /// Remove nothing in the guest, and seal a machine that is off even if its SSH host key, machine-id or host
        /// name is on its disk; the version is then marked as not generalised
        #[arg(long)]
        keep_identity: bool,
    },
    /// Discard a maintenance session with all its changes; the machine must be off
    Discard {
        /// IMAGE
        #[arg(add = complete::images())]
        image: String,
    },
    /// Retire a version: it does not count as the newest any more and cannot be promoted
    Retire {
        /// IMAGE@NUMBER or IMAGE@HASH
        #[arg(add = complete::images())]
        image: String,
        /// Bring the version back into use
        #[arg(long)]
        undo: bool,
    },
    /// Change the note of a version, also of a retired one
    Note {
        /// IMAGE@NUMBER or IMAGE@HASH
        #[arg(add = complete::images())]
        image: String,
        /// A line about the version, for people; '' removes the note
        #[arg(allow_hyphen_values = true)]
        text: String,
    },
    /// Show what changed between two versions: bytes, and files of ext, FAT and NTFS file systems
    Diff {
        /// The older version: IMAGE, IMAGE:CHANNEL, IMAGE@NUMBER or IMAGE@HASH
        #[arg(add = complete::images())]
        from: String,
        /// The newer version
        #[arg(add = complete::images())]
        to: String,
    },
    /// Show, record, merge and remove the boot trace of a version: what its first boots read, so that later boots can
    /// prefetch it
    #[command(subcommand)]
    Trace(TraceCommand),
    /// Show who changed an image, and when
    History {
        /// IMAGE
        #[arg(add = complete::images())]
        image: String,
        /// The most changes to show
        #[arg(long, value_name = "COUNT", default_value_t = 100)]
        limit: u32,
    },
    /// Show an image and its versions
    Show {
        /// IMAGE, IMAGE:CHANNEL, IMAGE@NUMBER or IMAGE@HASH
        #[arg(add = complete::images())]
        image: String,
    },
    /// Read a version completely and compare it with its hashes; a report of damage names the affected files and
    /// machines
    Verify {
        /// IMAGE, IMAGE:CHANNEL, IMAGE@NUMBER or IMAGE@HASH
        #[arg(add = complete::images())]
        image: String,
        /// Read at most this many bytes per second [default: no limit]
        #[arg(long, value_name = "RATE", value_parser = streaming::rate)]
        rate: Option<u64>,
        /// Repair damage from this store or server, if it has an intact copy; may be given several times. Servers get
        /// the daemon's token if they were named when the daemon was started, as with --repair-from
        #[arg(long, value_name = "STORE")]
        repair_from: Vec<String>,
    },
    /// Write a version to a new file
    Export {
        /// IMAGE, IMAGE:CHANNEL, IMAGE@NUMBER or IMAGE@HASH
        #[arg(add = complete::images())]
        image: String,
        /// The file; it must not exist; - is not supported, because the daemon writes the file
        #[arg(value_hint = ValueHint::FilePath)]
        file: PathBuf,
        /// raw, qcow2, vhd, vhd-fixed (for Azure), vhdx or vmdk; vhd, vhdx and vmdk need qemu-img [default: by the
        /// file's extension, else raw]
        #[arg(long, value_parser = ExportFormat::parse)]
        format: Option<ExportFormat>,
    },
    /// Publish a version to the gallery of a connection, so that machines can be made of it in Azure. The version is
    /// checked first: it must be generalised and, unless --no-agent-check is given, have a program that reports to Azure
    /// that it has booted. An interrupted upload continues
    Publish {
        /// IMAGE, IMAGE:CHANNEL, IMAGE@NUMBER or IMAGE@HASH
        #[arg(add = complete::images())]
        image: String,
        /// The connection
        #[arg(long, add = complete::connections())]
        connection: String,
        /// The number of replicas in the region; Microsoft advises one for each 20 machines that are made at the same time [default: 1]
        #[arg(long, value_name = "COUNT", value_parser = clap::value_parser!(u32).range(1..=100))]
        replicas: Option<u32>,
        /// Publish it even if no program is found in it that reports to Azure: no cloud-init, no waagent, no systemd unit that
        /// reports
        #[arg(long)]
        no_agent_check: bool,
        /// State that the version can boot from NVMe disks, which sizes of series v6 need
        #[arg(long)]
        nvme: bool,
    },
    /// List the published versions
    Published {
        /// Only those of this image
        #[arg(add = complete::images())]
        image: Option<String>,
    },
    /// Remove a published version from the gallery of a connection, or what an incomplete publication made; the version
    /// in the store stays
    Unpublish {
        /// IMAGE@NUMBER
        #[arg(add = complete::images())]
        image: String,
        /// The connection
        #[arg(long, add = complete::connections())]
        connection: String,
    },
    /// Remove an image, or one of its versions, unless a machine, a channel or a pin uses it
    Remove {
        /// IMAGE: with all its versions and channels. IMAGE@NUMBER, IMAGE@HASH or IMAGE:maintenance: that version
        #[arg(add = complete::images())]
        image: String,
        /// For IMAGE: even if channels point to its versions, now or by schedule. Versions that a machine or a pin
        /// uses always stay
        #[arg(long)]
        force: bool,
    },
}

/// `headwater image trace ...`.
#[derive(Debug, Subcommand)]
pub enum TraceCommand {
    /// Show how many boots the boot trace was made from, what the trace contains, and where it is stored
    Show {
        /// IMAGE, IMAGE:CHANNEL, IMAGE@NUMBER or IMAGE@HASH
        #[arg(add = complete::images())]
        image: String,
    },
    /// Boot the version once, on a temporary machine, and record what it reads
    Record {
        /// IMAGE, IMAGE:CHANNEL, IMAGE@NUMBER or IMAGE@HASH
        #[arg(add = complete::images())]
        image: String,
        /// Continue to record for this time after the guest has booted, because some programs start late; two minutes
        /// in total at most
        #[arg(long, value_name = "SECONDS", default_value_t = 0)]
        after: u64,
        /// Size of the machine
        #[command(flatten)]
        machine: MachineArgs,
    },
    /// Merge boot traces that were saved on other hosts
    Merge {
        /// IMAGE, IMAGE:CHANNEL, IMAGE@NUMBER or IMAGE@HASH
        #[arg(add = complete::images())]
        image: String,
        /// The files that 'trace save' wrote
        #[arg(required = true, value_name = "FILE", value_hint = ValueHint::FilePath)]
        files: Vec<PathBuf>,
    },
    /// Write the boot trace to a file, for another host to merge
    Save {
        /// IMAGE, IMAGE:CHANNEL, IMAGE@NUMBER or IMAGE@HASH
        #[arg(add = complete::images())]
        image: String,
        /// The file; it must not exist
        #[arg(value_hint = ValueHint::FilePath)]
        file: PathBuf,
    },
    /// Remove the boot trace; the next boots are recorded again
    Remove {
        /// IMAGE, IMAGE:CHANNEL, IMAGE@NUMBER or IMAGE@HASH
        #[arg(add = complete::images())]
        image: String,
    },
}
