//! Options of the front-ends of `headwater export`: the ways in which it serves a disk (NBD, iSCSI, a FUSE file, a
//! block device of this kernel). Also the options of `headwater detach`.

use std::path::PathBuf;

use clap::{Args, ValueEnum, ValueHint};
use headwater_iscsi::IscsiName;
use headwater_nbd::Address;

/// Options of `headwater export --nbd`.
#[derive(Debug, Args)]
pub struct NbdArgs {
    /// Where to listen for NBD clients: unix:PATH or tcp:HOST[:PORT] (10809 unless given)
    #[arg(long, value_name = "ADDRESS")]
    pub nbd: Option<Address>,
    /// The export's name; clients must then use it [default: one export with any name or none]; if given several
    /// times, each export is for another machine, with its own disk and write cache
    #[arg(long, value_name = "NAME", requires = "nbd", value_parser = export_name)]
    pub nbd_export: Vec<String>,
    /// TLS of the NBD server
    #[command(flatten)]
    pub tls: NbdTlsArgs,
}

/// Checks an export name, which must fit into a URI and a list of names without escapes.
fn export_name(text: &str) -> Result<String, String> {
    let fits = (1..=63).contains(&text.len())
        && text.bytes().all(|byte| byte.is_ascii_alphanumeric() || matches!(byte, b'-' | b'_' | b'.'))
        && !text.starts_with('.');
    if fits { Ok(text.to_owned()) } else { Err("1 to 63 letters, digits, '-', '_' and '.'".into()) }
}

/// Whether NBD clients must use TLS.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum)]
pub enum Demand {
    /// Clients without TLS are refused
    #[default]
    Required,
    /// Clients choose
    Optional,
}

/// TLS of the NBD server of `headwater export`.
#[derive(Debug, Args)]
pub struct NbdTlsArgs {
    /// Encrypt NBD with the files of this directory, named as QEMU and nbdkit name them: ca-cert.pem,
    /// server-cert.pem, server-key.pem and, if there is one, ca-crl.pem
    #[arg(long, value_name = "DIR", requires = "nbd", value_hint = ValueHint::DirPath)]
    pub tls_certificates: Option<PathBuf>,
    /// Whether NBD clients must use TLS
    #[arg(long, value_name = "WHEN", value_enum, default_value_t, requires = "tls_certificates")]
    pub tls: Demand,
    /// Accept only NBD clients with a certificate that ca-cert.pem has signed
    #[arg(long, requires = "tls_certificates")]
    pub tls_verify_peer: bool,
    /// Accept only NBD clients whose certificate has this common name or DNS name: NAME, or with --nbd-export
    /// NAME=EXPORT[,EXPORT..] for some exports. May be given several times
    #[arg(long, value_name = "NAME[=EXPORT,..]", requires = "tls_certificates")]
    pub tls_allow: Vec<String>,
}

/// Options of `headwater export --iscsi`.
#[derive(Debug, Args)]
pub struct IscsiArgs {
    /// Where to listen for iSCSI initiators: tcp:HOST[:PORT] (3260 unless given)
    #[arg(long, value_name = "ADDRESS")]
    pub iscsi: Option<headwater_iscsi::Address>,
    /// The target's name, for instance iqn.2026-01.org.example:disk1 [default: made from the source's name]; if given
    /// several times, each target is for another machine, with its own disk and write cache
    #[arg(long, value_name = "NAME", requires = "iscsi")]
    pub iscsi_target: Vec<IscsiName>,
    /// Who may log in: a file with lines 'initiator NAME SECRET [TARGET..]', and for mutual CHAP 'target NAME
    /// SECRET', that only its owner can read; HEADWATER_CHAP in the environment may have the same lines instead
    #[arg(long, value_name = "FILE", requires = "iscsi", value_hint = ValueHint::FilePath)]
    pub chap_file: Option<PathBuf>,
}

/// Options of `headwater export --fuse`.
#[derive(Debug, Args)]
pub struct FuseArgs {
    /// Empty directory in which the volume appears as one regular file (FUSE), for tools that need a file
    #[arg(long, value_name = "DIR", value_hint = ValueHint::DirPath)]
    pub fuse: Option<PathBuf>,
    /// Name of that file
    #[arg(long, value_name = "NAME", default_value = "disk", requires = "fuse")]
    pub fuse_name: String,
    /// Let other users access the file, as far as its owner and permissions (chown, chmod) allow
    #[arg(long, requires = "fuse")]
    pub fuse_allow_other: bool,
}

/// Options of `headwater attach`, and of `headwater export --attach`.
#[derive(Clone, Debug, Args)]
pub struct AttachArgs {
    /// Make the volume a block device of this kernel, like 'headwater attach'
    #[arg(long)]
    pub attach: bool,
    /// The device: ublkbN or nbdN, or a name of your choice, which becomes /dev/headwater/NAME
    #[arg(long, value_name = "NAME")]
    pub device: Option<String>,
    /// How the kernel reaches the volume [default: ublk if this kernel has it, else nbd]
    #[arg(long, value_name = "HOW", value_enum)]
    pub via: Option<Via>,
    /// Answer writes only when they are durable; with --persistent the device then survives a crash of this program:
    /// its requests wait until the same command is started again
    #[arg(long)]
    pub write_through: bool,
    /// Queues of a ublk device, each with a thread: 1 to 64
    #[arg(long, value_name = "COUNT", default_value_t = 1, value_parser = clap::value_parser!(u16).range(1..=64))]
    pub queues: u16,
}

/// The ways to attach a device.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Via {
    /// The kernel sends requests to this program through io_uring
    Ublk,
    /// The kernel's NBD client over a local socket
    Nbd,
}

/// `headwater detach`.
#[derive(Debug, Args)]
pub struct DetachArgs {
    /// The device, for instance /dev/ublkb0, or the name it was given
    pub device: String,
    /// Also if it is mounted or otherwise in use; its users get errors
    #[arg(long)]
    pub force: bool,
}
