//! Options of `headwater catalog create` for machines in a cloud: the connection, and how machines are created there. The
//! options have the names of `headwater scheme check`.

use std::path::PathBuf;

use clap::{Args, ValueHint};
use headwater_api::CloudScheme;
use headwater_block::size;
use headwater_sizes::OsDiskPlace;

use crate::cli::complete;
use crate::cli::size::place;

/// How the machines of a catalog are created in a cloud.
#[derive(Debug, Args)]
pub struct CloudArgs {
    /// Create the machines in Azure with this connection, and not on hosts; the version must be published there
    #[arg(long, value_name = "CONNECTION", requires = "size", requires = "subnet", requires = "ssh_key", add = complete::connections())]
    pub connection: Option<String>,
    /// The VM size, such as Standard_D8ds_v5
    #[arg(long, requires = "connection", add = complete::sizes())]
    size: Option<String>,
    /// A size to try if Azure has none of the sizes before; may be given several times
    #[arg(long, value_name = "SIZE", requires = "connection", add = complete::sizes())]
    backup_size: Vec<String>,
    /// The OS disk is on the host if possible, and then lost with it
    #[arg(long, requires = "connection")]
    ephemeral: bool,
    /// The allowed places of the OS disk, best place first [default: cache,temp,nvme,managed with --ephemeral, else managed]
    #[arg(long, value_name = "PLACE,..", value_parser = place(), value_delimiter = ',', requires = "connection")]
    places: Vec<OsDiskPlace>,
    /// The whole image is copied to the host; needs --ephemeral, and space for twice the OS disk
    #[arg(long, requires = "connection")]
    full_copy: bool,
    /// The zones in which machines are made: 1, 2, 3 [default: any]
    #[arg(long, value_name = "ZONE,..", value_delimiter = ',', requires = "connection")]
    zones: Vec<u8>,
    /// The size of the OS disk, in whole GiB [default: that of the version, rounded up]
    #[arg(long, value_name = "SIZE", value_parser = size::parse, requires = "connection")]
    os_disk: Option<u64>,
    /// The identifier of the subnet: /subscriptions/../subnets/NAME
    #[arg(long, value_name = "ID", requires = "connection")]
    subnet: Option<String>,
    /// The identifier of a network security group [default: that of the subnet]
    #[arg(long, value_name = "ID", requires = "connection")]
    security_group: Option<String>,
    /// The user with administrator rights in each guest [default: headwater]
    #[arg(long, value_name = "NAME", requires = "connection")]
    admin_user: Option<String>,
    /// The file with the public SSH key of that user
    #[arg(long, value_name = "FILE", value_hint = ValueHint::FilePath, requires = "connection")]
    pub ssh_key: Option<PathBuf>,
}

impl CloudArgs {
    /// The cloud scheme of these flags, with this SSH key. `None`: without a connection.
    pub fn scheme(&self, ssh_key: String) -> Option<CloudScheme> {
        Some(CloudScheme {
            connection: self.connection.clone()?,
            size: self.size.clone().unwrap_or_default(),
            backup_sizes: self.backup_size.clone(),
            ephemeral: self.ephemeral,
            places: self.places.iter().map(ToString::to_string).collect(),
            full_copy: self.full_copy,
            zones: self.zones.clone(),
            os_disk_bytes: self.os_disk,
            subnet: self.subnet.clone().unwrap_or_default(),
            security_group: self.security_group.clone(),
            admin_user: self.admin_user.clone().unwrap_or_else(CloudScheme::default_admin_user),
            ssh_key,
        })
    }
}
