//! Flags of `headwater image`.

use std::path::PathBuf;

use clap::{Subcommand, ValueHint};
use headwater_api::{Channel, ExportFormat, SourceFormat};

use crate::cli::{MachineArgs, complete};
use crate::streaming;

/// `headwater image ...`.
#[derive(Debug, Subcommand)]
pub enum ImageCommand {
    /// Make a version of a raw, qcow2, VHD, VHDX or VMDK file, or of an NBD export
    Import {
        /// A file, - for standard input, or nbd://HOST[:PORT]/NAME, nbds://HOST[:PORT]/NAME[?tls-certificates=DIR] (with TLS) or
        /// nbd+unix:///NAME?socket=PATH
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
        /// Size of the disk's sectors: 512 or 4096 [default: what its partition table says, or the file, device or server]
        #[arg(long = "sector-size", value_name = "BYTES", value_parser = super::sector_bytes)]
        sector_bytes: Option<u32>,
    },
    /// Bring versions of another store into the daemon's own, each under its own number, while machines run; what is there is not
    /// sent again. Without names all that it has, with the channels
    Pull {
        /// A directory, s3://BUCKET/PREFIX[?endpoint=URL], or servers: https://HOST[,https://HOST..]. The daemon opens it: with its
        /// keys for S3, and with its --token and --ca where the servers were named when it was started, as with --repair-from
        #[arg(value_name = "STORE")]
        source: String,
        /// IMAGE, IMAGE:CHANNEL, IMAGE@NUMBER or IMAGE@HASH of that store [default: all, with the channels]
        images: Vec<String>,
    },
    /// List all images
    List,
    /// List an image's versions: channels, state, author, machines that run them
    Versions {
        /// IMAGE
        #[arg(add = complete::images())]
        image: String,
    },
    /// Have a channel point to a version; machines get it at their next boot
    Promote {
        /// IMAGE@NUMBER or IMAGE@HASH; with --cancel IMAGE
        #[arg(add = complete::images())]
        image: String,
        /// test or production
        #[arg(value_parser = Channel::parse)]
        channel: Channel,
        /// When: 2026-12-24T03:00Z (UTC), or +90m, +12h, +7d from now
        #[arg(long, value_name = "TIME", conflicts_with = "cancel")]
        at: Option<String>,
        /// Forget the scheduled promotion of this channel
        #[arg(long)]
        cancel: bool,
        /// To production even if the version is not generalised: whoever reads the store may have a machine's private key
        #[arg(long, conflicts_with = "cancel")]
        force: bool,
    },
    /// Have a channel point where it pointed before
    Revert {
        /// IMAGE
        #[arg(add = complete::images())]
        image: String,
        /// test or production
        #[arg(value_parser = Channel::parse)]
        channel: Channel,
    },
    /// Have a machine, or all of a catalog, boot one version, whatever the channels say
    Pin {
        /// The machine or catalog
        #[arg(value_name = "MACHINE|CATALOG", add = complete::machines_and_catalogs())]
        name: String,
        /// IMAGE@NUMBER or IMAGE@HASH
        #[arg(add = complete::images())]
        image: String,
    },
    /// Let a machine, or all of a catalog, follow its image again
    Unpin {
        /// The machine or catalog
        #[arg(value_name = "MACHINE|CATALOG", add = complete::machines_and_catalogs())]
        name: String,
    },
    /// Change an image on a machine: it boots the newest version on a private disk that is kept until seal or discard
    Edit {
        /// IMAGE
        #[arg(add = complete::images())]
        image: String,
        /// The machine; it must be off
        #[arg(long, add = complete::machines())]
        machine: String,
    },
    /// Make a version of what was changed since edit. If the machine is on, its identity is removed in its guest, and it is switched off
    Seal {
        /// IMAGE
        #[arg(add = complete::images())]
        image: String,
        /// A line about the version, for people
        #[arg(long)]
        note: Option<String>,
        /// Also where the image has newer versions, whose changes are not in it then
        #[arg(long)]
        over_newer: bool,
        /// Remove nothing, and seal a machine that is off even if its SSH host key, machine-id or host name is on its disk; the
        /// version is marked as not generalised then
        #[arg(long)]
        keep_identity: bool,
    },
    /// Forget what was changed since edit; the machine must be off
    Discard {
        /// IMAGE
        #[arg(add = complete::images())]
        image: String,
    },
    /// Take a version out of use: it is not the newest any more and cannot be promoted
    Retire {
        /// IMAGE@NUMBER or IMAGE@HASH
        #[arg(add = complete::images())]
        image: String,
        /// Bring it back
        #[arg(long)]
        undo: bool,
    },
    /// Change the note of a version, also of a retired one
    Note {
        /// IMAGE@NUMBER or IMAGE@HASH
        #[arg(add = complete::images())]
        image: String,
        /// A line about the version, for people; '' takes the note away
        #[arg(allow_hyphen_values = true)]
        text: String,
    },
    /// Show what changed between two versions: bytes, and files of ext, FAT and NTFS file systems
    Diff {
        /// The older one: IMAGE, IMAGE:CHANNEL, IMAGE@NUMBER or IMAGE@HASH
        #[arg(add = complete::images())]
        from: String,
        /// The newer one
        #[arg(add = complete::images())]
        to: String,
    },
    /// Show, record, merge and remove a version's boot trace: what its boots read first, and later ones have ahead
    #[command(subcommand)]
    Trace(TraceCommand),
    /// Show who changed an image, and when
    History {
        /// IMAGE
        #[arg(add = complete::images())]
        image: String,
        /// At most so many changes
        #[arg(long, value_name = "COUNT", default_value_t = 100)]
        limit: u32,
    },
    /// Show an image and its versions
    Show {
        /// IMAGE, IMAGE:CHANNEL, IMAGE@NUMBER or IMAGE@HASH
        #[arg(add = complete::images())]
        image: String,
    },
    /// Read all of a version and compare it with its hashes; a report of damage names the files and machines that it affects
    Verify {
        /// IMAGE, IMAGE:CHANNEL, IMAGE@NUMBER or IMAGE@HASH
        #[arg(add = complete::images())]
        image: String,
        /// Read at most so many bytes a second [default: as many as the store gives]
        #[arg(long, value_name = "RATE", value_parser = streaming::rate)]
        rate: Option<u64>,
        /// Repair what is damaged from this store or server, if it has it; may be given several times. Servers are
        /// shown the daemon's token where they were named when it was started, as with --repair-from
        #[arg(long, value_name = "STORE")]
        repair_from: Vec<String>,
    },
    /// Write a version to a new file
    Export {
        /// IMAGE, IMAGE:CHANNEL, IMAGE@NUMBER or IMAGE@HASH
        #[arg(add = complete::images())]
        image: String,
        /// The file; it must not exist, and - is refused: the daemon writes it
        #[arg(value_hint = ValueHint::FilePath)]
        file: PathBuf,
        /// raw, qcow2, vhd, vhd-fixed (for Azure), vhdx or vmdk; vhd, vhdx and vmdk need qemu-img [default: the file's extension where it is one of these, else raw]
        #[arg(long, value_parser = ExportFormat::parse)]
        format: Option<ExportFormat>,
    },
    /// Remove an image, or one of its versions, unless a machine, a channel or a pin uses it
    Remove {
        /// IMAGE: with all its versions and channels. IMAGE:CHANNEL, IMAGE@NUMBER or IMAGE@HASH: that version
        #[arg(add = complete::images())]
        image: String,
        /// Of IMAGE: even if a channel points to one of its versions, or will. A version that a machine or a pin uses stays
        #[arg(long)]
        force: bool,
    },
}

/// `headwater image trace ...`.
#[derive(Debug, Subcommand)]
pub enum TraceCommand {
    /// Show how many boots it was made from, what it holds, and where it is kept
    Show {
        /// IMAGE, IMAGE:CHANNEL, IMAGE@NUMBER or IMAGE@HASH
        #[arg(add = complete::images())]
        image: String,
    },
    /// Boot the version once, on a machine that is made for it and removed again, and record what it reads
    Record {
        /// IMAGE, IMAGE:CHANNEL, IMAGE@NUMBER or IMAGE@HASH
        #[arg(add = complete::images())]
        image: String,
        /// Record for so long after the guest is up, because some programs start late; two minutes in all at most
        #[arg(long, value_name = "SECONDS", default_value_t = 0)]
        after: u64,
        /// Size of the machine
        #[command(flatten)]
        machine: MachineArgs,
    },
    /// Take in boot traces that other hosts saved
    Merge {
        /// IMAGE, IMAGE:CHANNEL, IMAGE@NUMBER or IMAGE@HASH
        #[arg(add = complete::images())]
        image: String,
        /// What 'trace save' wrote there
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
    /// Forget the boot trace; the next boots are recorded again
    Remove {
        /// IMAGE, IMAGE:CHANNEL, IMAGE@NUMBER or IMAGE@HASH
        #[arg(add = complete::images())]
        image: String,
    },
}
