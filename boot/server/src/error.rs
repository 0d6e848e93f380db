//! Errors for which the boot server cannot start.

use std::path::PathBuf;

/// An error of the boot server.
#[derive(Debug, thiserror::Error)]
pub enum BootError {
    /// A socket cannot be opened.
    #[error("cannot listen for {what} on {interface}")]
    Listen {
        /// Which protocol and port.
        what: String,
        /// The interface.
        interface: String,
        /// Why.
        source: std::io::Error,
    },
    /// The interface has no IPv4 address, or does not exist.
    #[error("cannot serve network boot on {interface}: it has no IPv4 address, or it does not exist")]
    Interface {
        /// Its name.
        interface: String,
        /// Why.
        source: std::io::Error,
    },
    /// A loader is not installed.
    #[error("cannot serve network boot: there is no {what} ({paths}); install the Debian package ipxe")]
    Loader {
        /// The purpose of the loader.
        what: &'static str,
        /// The paths that were tried.
        paths: String,
    },
    /// A loader cannot be read.
    #[error("cannot read the loader {}", .path.display())]
    ReadLoader {
        /// Its file.
        path: PathBuf,
        /// Why.
        source: std::io::Error,
    },
    /// A loader cannot be used.
    #[error("cannot serve the loader {}", .path.display())]
    Efi {
        /// Its file.
        path: PathBuf,
        /// Why.
        source: crate::efi::EfiError,
    },
    /// GRUB was built without HTTP.
    #[error(
        "cannot serve {}: this GRUB cannot load files over HTTP; unpack grub-efi-amd64-signed of Debian 13 and give its directory with --boot-signed",
        .path.display()
    )]
    OldGrub {
        /// Its file.
        path: PathBuf,
    },
    /// The file of leases cannot be read or written.
    #[error("cannot assign addresses over DHCP: cannot read or write the lease file {}", .path.display())]
    Leases {
        /// The file.
        path: PathBuf,
        /// Why.
        source: std::io::Error,
    },
    /// The file of leases is damaged.
    #[error(
        "cannot assign addresses over DHCP: line {line} of the lease file {} is not a lease; correct or remove that line, or remove the file",
        .path.display()
    )]
    DamagedLeases {
        /// The file.
        path: PathBuf,
        /// The line, from 1.
        line: usize,
    },
}
