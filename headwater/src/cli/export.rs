//! Flags of `headwater export` and `headwater attach`.

use std::path::PathBuf;

use clap::{ArgGroup, Args, ValueHint};
use headwater_api::SourceFormat;

use crate::caches::{CacheArgs, LimitArgs};
use crate::cli::{AttachArgs, FuseArgs, IscsiArgs, NbdArgs};
use crate::stores::Credentials;
use crate::streaming::StreamArgs;

/// Where the overflow goes unless `--cache-dir` says otherwise: on disk, unlike `/tmp` on many systems.
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
    /// The source as it was given: of a URL, `source` is the image alone.
    #[arg(skip)]
    pub given: String,
    /// The format of FILE: raw, qcow2, vhd (or vpc), vhdx or vmdk [default: what its bytes look like]. Say raw for a raw
    /// disk that a guest has written which is not trusted: its bytes may look like an image that names files of this host
    #[arg(long, value_parser = SourceFormat::parse)]
    pub format: Option<SourceFormat>,
    /// Allow a qcow2 file backing files outside of its own directory, and devices: whatever it names is read
    #[arg(long)]
    pub backing: bool,
    /// The write cache
    #[command(flatten)]
    pub limits: LimitArgs,
    /// Directory of the overflow, or a block device that holds nothing and has --disk bytes or more
    #[arg(long, value_name = "DIR|DEVICE", default_value = DEFAULT_CACHE_DIR, value_hint = ValueHint::AnyPath)]
    pub cache_dir: PathBuf,
    /// What the write caches of several machines have in common
    #[command(flatten)]
    pub caches: CacheArgs,
    /// The NBD server
    #[command(flatten)]
    pub nbd: NbdArgs,
    /// Socket for a virtual machine with shared memory (vhost-user-blk); given several times, each is another machine's,
    /// with a disk and a write cache of its own
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
    /// another store. A URL as the source says it, too
    #[arg(long, value_name = "STORE")]
    pub from: Option<String>,
    /// Token and authorities of the servers
    #[command(flatten)]
    pub credentials: Credentials,
    /// How an image on another host is read
    #[command(flatten)]
    pub stream: StreamArgs,
    /// Keep what is written, in a cache of this name in the cache directory: flushes become durable, and
    /// another export of the same source with the same name goes on where this one ended
    #[arg(long, value_name = "NAME")]
    pub persistent: Option<String>,
    /// Where the persistent cache's key is kept; made if missing [default: keys/NAME in the data directory]
    #[arg(long, value_name = "FILE", requires = "persistent", value_hint = ValueHint::FilePath)]
    pub key_file: Option<PathBuf>,
    /// Write the counters to this file at the end and on SIGUSR1: as JSON, or for Prometheus where its name ends in .prom
    #[arg(long, value_name = "FILE", value_hint = ValueHint::FilePath)]
    pub stats: Option<PathBuf>,
    /// Write which requests the machines send to this new file, never what they carry: for `headwater-study sizing`
    #[arg(long, value_name = "FILE", value_hint = ValueHint::FilePath)]
    pub record: Option<PathBuf>,
    /// What is logged to standard error: error, warn, info, debug, trace, or a filter
    #[arg(long, value_name = "FILTER", default_value = "warn", env = "HEADWATER_LOG")]
    pub log: String,
}

/// A serial number that a guest can make a name in `/dev/disk/by-id` of.
fn serial(text: &str) -> Result<String, String> {
    let fits = (1..=headwater_vhost_user::SERIAL_BYTES).contains(&text.len())
        && text.bytes().all(|byte| byte.is_ascii_alphanumeric() || matches!(byte, b'-' | b'_' | b'.'));
    if fits { Ok(text.to_owned()) } else { Err("1 to 20 letters, digits, '-', '_' and '.'".into()) }
}
