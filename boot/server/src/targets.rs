//! The interface through which the boot server asks the rest of the program which machines are registered and what
//! they boot.

use std::path::PathBuf;

use async_trait::async_trait;
use headwater_dhcp::Mac;

/// A registered machine that boots from the network.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Known {
    /// Its name.
    pub name: String,
}

/// What a machine boots now.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Boot {
    /// The machine's name.
    pub machine: String,
    /// The MAC address of its network card.
    pub mac: Mac,
    /// The version, as `IMAGE@NUMBER`.
    pub version: String,
    /// The hash of its manifest.
    pub manifest: String,
    /// The kernel command line.
    pub options: String,
    /// The partition with its root file system; 0 is the whole disk.
    pub root_partition: u32,
}

/// A file of a version.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Artefact {
    /// Its kernel.
    Kernel,
    /// The initramfs that belongs to the kernel.
    Initrd,
}

/// The registered machines. Errors are text for people: the machine's screen and the log show them.
#[async_trait]
pub trait Targets: Send + Sync + 'static {
    /// The machine with this hardware address, if it boots from the network.
    async fn find(&self, mac: Mac) -> Result<Option<Known>, String>;

    /// The version that a machine boots now. Extracts its kernel and initramfs if necessary, which can take seconds.
    async fn boot(&self, mac: Mac) -> Result<Boot, String>;

    /// The path of an extracted file of a version. `manifest` comes from the network, so it can be any text.
    fn artefact(&self, manifest: &str, which: Artefact) -> Option<PathBuf>;

    /// The settings of a machine (host name, machine-id, servers, token and others) as a cpio archive. After this call the
    /// machine may read the image, and counts as booting.
    async fn settings(&self, boot: &Boot) -> Result<Vec<u8>, String>;

    /// Records why a machine cannot boot. It asks again every few seconds, so this is called with the same reason again and again.
    async fn refused(&self, mac: Mac, why: &str);

    /// A random token that cannot be guessed, for the URL of a machine's settings.
    fn token(&self) -> std::io::Result<[u8; 16]>;
}
