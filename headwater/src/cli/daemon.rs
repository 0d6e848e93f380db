//! Options of the commands that run a daemon or its disk process: `headwater run`, `serve`, `disks` and `upgrade`.

use std::net::SocketAddr;
use std::path::PathBuf;

use clap::{Args, ValueEnum, ValueHint};
use headwater_boot_server::Uefi;
use headwater_nbd::{Address, Right};

use crate::alarm_channels::AlarmArgs;
use crate::caches::CacheArgs;
use crate::cli::{LogFormat, MachineArgs, OfferArgs};
use crate::daemon::boot::{self, BootOffer};
use crate::daemon::exports::{self, Offer};
use crate::database::{DatabaseArgs, SharingArgs};
use crate::failure::invalid;
use crate::logging;
use crate::oidc;
use crate::stores::{self, Credentials};
use crate::streaming::{self, StreamArgs};

/// `headwater run`.
#[derive(Debug, Args)]
pub struct RunArgs {
    /// A raw, qcow2, VHD, VHDX or VMDK file, an NBD URI, or an image of the store: IMAGE, IMAGE:CHANNEL, IMAGE@NUMBER or
    /// IMAGE@HASH
    #[arg(value_name = "FILE|IMAGE", value_hint = ValueHint::FilePath)]
    pub source: String,
    /// Allow a qcow2 image to have devices as backing files, or files outside of its own directory: whatever it names
    /// is read
    #[arg(long)]
    pub backing: bool,
    /// How many machines, 1 to 1000
    #[arg(short = 'n', long, value_name = "COUNT", default_value_t = 1,
          value_parser = clap::value_parser!(u32).range(1..=1000))]
    pub count: u32,
    /// Write cache and size of each machine
    #[command(flatten)]
    pub machine: MachineArgs,
    /// Take images from this store instead of DIR/store: servers that offer a store (https://HOST[,https://HOST..]),
    /// s3://BUCKET/PREFIX, or a directory
    #[arg(long, visible_alias = "store", value_name = "STORE")]
    pub from: Option<String>,
    /// Token and certificate authorities for servers
    #[command(flatten)]
    pub credentials: Credentials,
    /// How images are read
    #[command(flatten)]
    pub stream: StreamArgs,
    /// Settings that all write caches share
    #[command(flatten)]
    pub caches: CacheArgs,
    /// Record the requests of each machine in a new file MACHINE-N.rec in this directory, without their data: for
    /// `headwater-study sizing`
    #[arg(long, value_name = "DIR", value_hint = ValueHint::DirPath)]
    pub record: Option<PathBuf>,
}

/// `headwater serve`.
#[derive(Debug, Args)]
pub struct ServeArgs {
    /// Take flags that are not given here from this file, which 'headwater config' checks and shows; SIGHUP reloads
    /// it
    #[arg(long, value_name = "FILE", value_hint = ValueHint::FilePath)]
    pub config: Option<PathBuf>,
    /// Let members of this process's group use the daemon as administrators: they can connect to its socket, and
    /// exchange files with it in DIR/exchange
    #[arg(long)]
    pub group_access: bool,
    /// Also serve the API at this TCP address, for instance 0.0.0.0:9470, with TLS unless it is a loopback address;
    /// clients need a token: 'headwater token create' makes one, 'headwater login' uses it on another computer
    #[arg(long, value_name = "ADDR", value_parser = super::ip_and_port)]
    pub listen: Option<SocketAddr>,
    /// Also serve the web console at this address, for instance 0.0.0.0:9471, with TLS unless it is a loopback
    /// address; 'headwater console' opens it
    #[arg(long, value_name = "ADDR", value_parser = super::ip_and_port)]
    pub console: Option<SocketAddr>,
    /// How people log in
    #[command(flatten)]
    pub oidc: oidc::Settings,
    /// The database
    #[command(flatten)]
    pub database: DatabaseArgs,
    /// The other daemons of the database
    #[command(flatten)]
    pub sharing: SharingArgs,
    /// Also let nodes of other hosts join and connect at this address, for instance 0.0.0.0:9472, always with TLS:
    /// see 'headwater node token'
    #[arg(long, value_name = "ADDR", value_parser = super::ip_and_port)]
    pub nodes: Option<SocketAddr>,
    /// How long a node that cannot reach its controller runs the machines of catalogs with --on-host-loss restart;
    /// then it ends them so that other hosts can start them; 5s to 1h
    #[arg(long, value_name = "TIME", value_parser = node_lease, default_value = "30s")]
    pub node_lease: u64,
    /// Store images here instead of in DIR/store: a directory, or s3://BUCKET/PREFIX[?endpoint=URL] with
    /// the keys of AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY; or read them from servers that offer a store,
    /// https://HOST[,https://HOST..]
    #[arg(long, visible_alias = "from", value_name = "STORE")]
    pub store: Option<String>,
    /// Begin with an empty store if that directory has none, although the database knows machines or images
    #[arg(long)]
    pub new_store: bool,
    /// Start the machines that were on when the last daemon ended, also after a crash; retry each until it is on
    #[arg(long)]
    pub resume: bool,
    /// Leave machines on when the daemon is stopped by SIGTERM, unless the host shuts down: the next daemon takes
    /// them over. Without this they are switched off
    #[arg(long)]
    pub keep_machines: bool,
    /// Token and certificate authorities for servers
    #[command(flatten)]
    pub credentials: Credentials,
    /// How images on other hosts are read
    #[command(flatten)]
    pub stream: StreamArgs,
    /// Also offer the store to others over HTTP at this address, read-only; addresses other than loopback need TLS,
    /// and --token-file or --boot
    #[arg(long, value_name = "ADDR", value_parser = super::ip_and_port)]
    pub store_listen: Option<SocketAddr>,
    /// Certificate, key and tokens of the offered store
    #[command(flatten)]
    pub offer: OfferArgs,
    /// The boot server
    #[command(flatten)]
    pub boot: ServeBootArgs,
    /// The NBD server
    #[command(flatten)]
    pub nbd: ServeNbdArgs,
    /// The channels of alarms
    #[command(flatten)]
    pub alarms: AlarmArgs,
    /// Verify all versions in the background, at this rate in bytes per second
    #[arg(long, value_name = "RATE", value_parser = streaming::rate)]
    pub scrub: Option<u64>,
    /// How long the verification pauses after it has read all versions once, in seconds [default: 3600]
    #[arg(long, value_name = "SECONDS", requires = "scrub", value_parser = clap::value_parser!(u64).range(1..))]
    pub scrub_pause: Option<u64>,
    /// Repair damage that the verification finds from this store or server, if it has an intact copy. Its servers
    /// also get the token if 'image pull' or 'image verify' names them; may be given several times
    #[arg(long, value_name = "STORE")]
    pub repair_from: Vec<String>,
    /// Also remove this file in guests whose maintenance sessions are sealed, in addition to the machine's identity:
    /// an absolute path in the guest, which may have wildcards; may be given several times
    #[arg(long, value_name = "PATH", value_parser = super::guest_path)]
    pub seal_removes: Vec<String>,
    /// Settings that all write caches share
    #[command(flatten)]
    pub caches: CacheArgs,
    /// The format of the log
    #[arg(long, value_name = "FORMAT", value_enum, default_value_t = LogFormat::Text)]
    pub log_format: LogFormat,
    /// What is logged: error, warn, info, debug, trace, or a filter such as headwater_service=debug
    #[arg(long, value_name = "FILTER", default_value = "info", env = "HEADWATER_LOG")]
    pub log: String,
}

/// `headwater disks`.
#[derive(Debug, Args)]
pub struct DisksArgs {
    /// End as soon as no daemon is connected and no disk is open
    #[arg(long)]
    pub end_unused: bool,
    /// Print the versions of what a program takes over in an upgrade, and end
    #[arg(long, hide = true)]
    pub versions: bool,
    /// How the log is written
    #[arg(long, value_name = "FORMAT", value_enum, default_value_t = LogFormat::Text)]
    pub log_format: LogFormat,
    /// What is logged: error, warn, info, debug, trace, or a filter such as headwater_service=debug
    #[arg(long, value_name = "FILTER", default_value = "info", env = "HEADWATER_LOG")]
    pub log: String,
}

/// `headwater upgrade`.
#[derive(Debug, Args)]
pub struct UpgradeArgs {
    /// The new program [default: the one that runs this command]
    #[arg(long, value_name = "FILE", value_hint = ValueHint::FilePath)]
    pub program: Option<PathBuf>,
}

/// How long the lease of a node lasts, in seconds.
fn node_lease(text: &str) -> Result<u64, String> {
    match super::task::span(text)? {
        seconds @ 5..=3_600 => Ok(seconds),
        _ => Err("a lease must last from 5s to 1h".to_owned()),
    }
}

impl ServeArgs {
    /// Fails for options that are not compatible, and for an invalid log filter. Opens nothing.
    pub fn check(&self) -> anyhow::Result<()> {
        logging::check_filter(&self.log)?;
        self.database.check()?;
        self.oidc.check(self.listen.is_some() || self.console.is_some())?;
        self.check_offer()?;
        if self.boot.boot.is_some() {
            boot::check(self.store_listen, self.offer.tls_cert.is_some())?;
        }
        let is_for_the_check = |store: &&String| self.scrub.is_none() && !stores::is_server(store);
        if let Some(store) = self.repair_from.iter().find(is_for_the_check) {
            return Err(invalid(format!(
                "--repair-from {store} repairs what a verification finds: give --scrub too"
            )));
        }
        Ok(())
    }

    /// Fails for options without effect.
    fn check_offer(&self) -> anyhow::Result<()> {
        if self.store_listen.is_some() {
            return Ok(());
        }
        if self.offer.token_file.is_some() {
            // Somebody could mistake it for a protection of the API.
            return Err(invalid("--token-file protects the offered store: give --store-listen too"));
        }
        let is_public = |address: &SocketAddr| !address.ip().is_loopback();
        if self.offer.tls_cert.is_some() && !self.listen.iter().chain(&self.console).any(is_public) {
            return Err(invalid(
                "--tls-cert is for addresses that other hosts can reach: give --store-listen, or a non-loopback address to --listen or --console",
            ));
        }
        Ok(())
    }
}

/// Network boot of `headwater serve`.
#[derive(Debug, Args)]
pub struct ServeBootArgs {
    /// Also boot registered machines in the network of this interface, beside the DHCP server there: they get boot
    /// loader, kernel and settings (ports 67, 69, 80 and 4011), and read their images at --store-listen with their
    /// own tokens. Needs root, or CAP_NET_BIND_SERVICE and CAP_NET_RAW
    #[arg(long, value_name = "INTERFACE", requires = "store_listen")]
    pub boot: Option<String>,
    /// The port for scripts, kernels and settings, over HTTP
    #[arg(long, value_name = "PORT", requires = "boot", default_value_t = 80, value_parser = clap::value_parser!(u16).range(1..))]
    pub boot_http: u16,
    /// Also be the DHCP server of the networks in this file: give addresses to all clients there. Without this,
    /// another DHCP server does
    #[arg(long, value_name = "FILE", requires = "boot", value_hint = ValueHint::FilePath)]
    pub boot_dhcp: Option<PathBuf>,
    /// The boot loader for machines with 64-bit UEFI: Debian's signed shim and GRUB, which work with Secure Boot, or
    /// iPXE, which is not signed
    #[arg(long, value_name = "LOADER", requires = "boot", value_enum, default_value_t = UefiLoader::Auto)]
    pub boot_uefi: UefiLoader,
    /// Take shimx64.efi.signed and grubnetx64.efi.signed from this directory [default: those of the packages shim-signed and
    /// grub-efi-amd64-signed]
    #[arg(long, value_name = "DIR", requires = "boot", value_hint = ValueHint::DirPath)]
    pub boot_signed: Option<PathBuf>,
    /// Certificate authorities that machines trust for --store-listen, as a PEM file [default: the file of
    /// --tls-cert]
    #[arg(long, value_name = "FILE", requires = "boot", value_hint = ValueHint::FilePath)]
    pub boot_ca: Option<PathBuf>,
    /// Switch a machine that boots from the network on with this program ('machine start'), which is run with the name of the machine and
    /// the address of its network card [default: a Wake-on-LAN packet on the interface of --boot]
    #[arg(long, value_name = "FILE", value_hint = ValueHint::ExecutablePath)]
    pub wake_command: Option<PathBuf>,
}

impl ServeBootArgs {
    /// The boot server's settings, if it was requested.
    pub fn offer(&self, store: &OfferArgs) -> Option<BootOffer> {
        let interface = self.boot.clone()?;
        let ca = self.boot_ca.clone().or_else(|| store.tls_cert.clone())?;
        let uefi = match self.boot_uefi {
            UefiLoader::Auto => Uefi::Auto,
            UefiLoader::Shim => Uefi::Shim,
            UefiLoader::Ipxe => Uefi::Ipxe,
        };
        let (dhcp, signed) = (self.boot_dhcp.clone(), self.boot_signed.clone());
        Some(BootOffer { interface, http_port: self.boot_http, dhcp, uefi, signed, ca })
    }
}

/// The boot loader for machines with UEFI.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum UefiLoader {
    /// shim if it is installed with a GRUB that has HTTP, else ipxe
    Auto,
    /// Debian's shim and GRUB
    Shim,
    /// iPXE
    Ipxe,
}

/// The NBD server of `headwater serve` for machines' disks.
#[derive(Debug, Args)]
pub struct ServeNbdArgs {
    /// Also offer machines' disks to NBD clients here, read-only, each as an export with the machine's name:
    /// unix:PATH or tcp:HOST[:PORT] (10809 unless given). tcp: needs --nbd-certificates and --nbd-allow
    #[arg(long, value_name = "ADDRESS")]
    pub nbd: Option<Address>,
    /// Encrypt NBD, and accept only clients with a certificate: directory with ca-cert.pem, server-cert.pem,
    /// server-key.pem and, if there is one, ca-crl.pem
    #[arg(long, value_name = "DIR", requires = "nbd", value_hint = ValueHint::DirPath)]
    pub nbd_certificates: Option<PathBuf>,
    /// Let clients whose certificate has this common name or DNS name read all machines' disks, or those that are
    /// listed: NAME or NAME=MACHINE[,MACHINE..]; may be given several times
    #[arg(long, value_name = "NAME[=MACHINE,..]", requires = "nbd_certificates", value_parser = exports::right)]
    pub nbd_allow: Vec<Right>,
}

impl ServeNbdArgs {
    /// The NBD server's settings, if it was requested.
    pub fn offer(self) -> anyhow::Result<Option<Offer>> {
        self.nbd.map(|address| Offer::new(address, self.nbd_certificates, self.nbd_allow)).transpose()
    }
}
