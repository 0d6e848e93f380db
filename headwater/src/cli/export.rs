//! Options of `headwater export`, which serves a disk from this process without a daemon, and of `headwater attach`,
//! which makes it a block device of this kernel.

use std::path::PathBuf;

use clap::{ArgGroup, Args, ValueHint};
use headwater_api::SourceFormat;

use crate::caches::{CacheArgs, LimitArgs};
use crate::cli::{AttachArgs, FuseArgs, IscsiArgs, NbdArgs};
use crate::stores::Credentials;
use crate::streaming::StreamArgs;

/// The default of `--cache-dir`: on disk, unlike `/tmp` on many systems.
const DEFAULT_CACHE_DIR: &str = "/var/tmp";

/// `headwater export`.
#[derive(Debug, Args)]
#[command(group(ArgGroup::new("front-end").args(["nbd", "vhost_user", "iscsi", "fuse", "attach"]).required(true).multiple(true)))]
pub struct ExportArgs {
    /// Whether addresses and counters are printed as JSON.
    #[arg(skip)]
    pub json: bool,
    /// An image of the store (IMAGE, IMAGE:CHANNEL, IMAGE@NUMBER or IMAGE@HASH), the same on servers
    /// (https://HOST[:PORT][/BASE]/IMAGE) or in a bucket (s3://BUCKET/PREFIX/IMAGE), a raw, qcow2, VHD, VHDX or VMDK file, or
    /// null:SIZE for an empty disk
    #[arg(value_name = "IMAGE|URL|FILE|null:SIZE", value_hint = ValueHint::FilePath)]
    pub source: String,
    /// The source as the user gave it. If it was a URL, `source` is only the image.
    #[arg(skip)]
    pub given: String,
    /// The format of FILE: raw, qcow2, vhd (or vpc), vhdx or vmdk [default: detected from its first bytes]. Give raw
    /// for a raw disk that an untrusted guest has written: its bytes may look like an image that names files of this
    /// host
    #[arg(long, value_parser = SourceFormat::parse)]
    pub format: Option<SourceFormat>,
    /// Allow a qcow2 file to have devices as backing files, or files outside of its own directory: whatever it names
    /// is read
    #[arg(long)]
    pub backing: bool,
    /// The write cache
    #[command(flatten)]
    pub limits: LimitArgs,
    /// Directory of the overflow files, or an empty block device of --disk bytes or more
    #[arg(long, value_name = "DIR|DEVICE", default_value = DEFAULT_CACHE_DIR, value_hint = ValueHint::AnyPath)]
    pub cache_dir: PathBuf,
    /// Settings that the write caches of several machines share
    #[command(flatten)]
    pub caches: CacheArgs,
    /// The NBD server
    #[command(flatten)]
    pub nbd: NbdArgs,
    /// Socket for a virtual machine with shared memory (vhost-user-blk); if given several times, each socket is for
    /// another machine, with its own disk and write cache
    #[arg(long, value_name = "PATH", value_hint = ValueHint::FilePath)]
    pub vhost_user: Vec<PathBuf>,
    /// The disk's serial number, as machines see it over vhost-user: 1 to 20 letters, digits, '-', '_' and '.'
    #[arg(long, value_name = "TEXT", default_value = "headwater", requires = "vhost_user", value_parser = serial)]
    pub serial: String,
    /// The iSCSI target
    #[command(flatten)]
    pub iscsi: IscsiArgs,
    /// The FUSE file
    #[command(flatten)]
    pub fuse: FuseArgs,
    /// The block device
    #[command(flatten)]
    pub attach: AttachArgs,
    /// Read the image from here: servers (https://HOST[,https://HOST..]), s3://BUCKET/PREFIX, or the directory of
    /// another store. A URL as the source has the same effect
    #[arg(long, value_name = "STORE")]
    pub from: Option<String>,
    /// Token and certificate authorities for servers
    #[command(flatten)]
    pub credentials: Credentials,
    /// How an image on another host is read
    #[command(flatten)]
    pub stream: StreamArgs,
    /// Keep written data in a cache of this name in the cache directory: flushes become durable, and
    /// another export of the same source with the same name continues where this one ended
    #[arg(long, value_name = "NAME")]
    pub persistent: Option<String>,
    /// The file with the persistent cache's key; created if missing [default: keys/NAME in the data directory]
    #[arg(long, value_name = "FILE", requires = "persistent", value_hint = ValueHint::FilePath)]
    pub key_file: Option<PathBuf>,
    /// Write the counters to this file at the start, at the end and on SIGUSR1: as JSON, or for Prometheus if its
    /// name ends in .prom
    #[arg(long, value_name = "FILE", value_hint = ValueHint::FilePath)]
    pub stats: Option<PathBuf>,
    /// Record the requests of the machines in this new file, without their data: for `headwater-study sizing`
    #[arg(long, value_name = "FILE", value_hint = ValueHint::FilePath)]
    pub record: Option<PathBuf>,
    /// What is logged to standard error: error, warn, info, debug, trace, or a filter
    #[arg(long, value_name = "FILTER", default_value = "warn", env = "HEADWATER_LOG")]
    pub log: String,
}

/// Checks a serial number: a guest makes a name in `/dev/disk/by-id` of it.
fn serial(text: &str) -> Result<String, String> {
    let fits = (1..=headwater_vhost_user::SERIAL_BYTES).contains(&text.len())
        && text.bytes().all(|byte| byte.is_ascii_alphanumeric() || matches!(byte, b'-' | b'_' | b'.'));
    if fits { Ok(text.to_owned()) } else { Err("1 to 20 letters, digits, '-', '_' and '.'".into()) }
}
