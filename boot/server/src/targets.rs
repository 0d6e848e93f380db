//! What the boot server asks of the rest of the program: who is registered, and what it boots.

use std::path::PathBuf;

use async_trait::async_trait;
use headwater_dhcp::Mac;

/// A registered machine.
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
    /// Its card.
    pub mac: Mac,
    /// The version, as `IMAGE@NUMBER`.
    pub version: String,
    /// The hash of its manifest.
    pub manifest: String,
    /// Options of its kernel.
    pub options: String,
    /// The partition with its root file system; 0 is the whole disk.
    pub root_partition: u32,
}

/// A file of a version.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Artefact {
    /// Its kernel.
    Kernel,
    /// The initramfs of that.
    Initrd,
}

/// The registered machines. Errors are for people: they are shown on the machine's screen and logged.
#[async_trait]
pub trait Targets: Send + Sync + 'static {
    /// The machine with this card, if it boots from the network.
    async fn find(&self, mac: Mac) -> Result<Option<Known>, String>;

    /// What a machine boots now; makes its kernel and initramfs ready, which can take seconds.
    async fn boot(&self, mac: Mac) -> Result<Boot, String>;

    /// The file of a version that was made ready. `manifest` comes from the network.
    fn artefact(&self, manifest: &str, which: Artefact) -> Option<PathBuf>;

    /// The settings of a machine that boots, as a cpio archive. From here on it may read the image, and counts as booting.
    async fn settings(&self, boot: &Boot) -> Result<Vec<u8>, String>;

    /// A number that nobody can guess.
    fn token(&self) -> std::io::Result<[u8; 16]>;
}
