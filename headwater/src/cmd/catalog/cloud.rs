//! Catalogs of machines in a cloud: reads the options of `headwater catalog create`, and shows such a catalog.

use headwater_api::{Catalog, CloudScheme};
use headwater_block::size;

use crate::cli::CloudArgs;
use crate::cmd::size_table::read_text;

/// The longest file with a public SSH key.
const SSH_KEY_MAX_BYTES: u64 = 16 << 10;

/// The cloud scheme of the options. `None`: the machines run on hosts.
pub fn scheme(args: &CloudArgs) -> anyhow::Result<Option<CloudScheme>> {
    let key = match &args.ssh_key {
        Some(path) => read_text("the SSH key", path, SSH_KEY_MAX_BYTES)?.trim().to_owned(),
        None => String::new(),
    };
    Ok(args.scheme(key))
}

/// What is shown of a catalog in a cloud, in place of the settings of machines on hosts.
pub fn pairs(catalog: &Catalog, cloud: &CloudScheme) -> Vec<(&'static str, String)> {
    let or_dash = |text: Option<String>| text.unwrap_or_else(|| "-".to_owned());
    let sizes: Vec<&str> =
        std::iter::once(&cloud.size).chain(&cloud.backup_sizes).map(String::as_str).collect();
    let places = match (cloud.places.is_empty(), cloud.ephemeral) {
        (false, _) => cloud.places.join(", "),
        (true, true) => "cache, temp, nvme, managed".to_owned(),
        (true, false) => "managed".to_owned(),
    };
    let disk = cloud.os_disk_bytes.map_or_else(|| "size of the version".to_owned(), size::format);
    let full = if cloud.full_copy { ", full copy" } else { "" };
    let zones: Vec<String> = cloud.zones.iter().map(ToString::to_string).collect();
    vec![
        ("connection", cloud.connection.clone()),
        ("sizes", sizes.join(", then ")),
        ("OS disk", format!("{disk}, on {places}{full}")),
        ("zones", if zones.is_empty() { "any".to_owned() } else { zones.join(", ") }),
        ("subnet", cloud.subnet.clone()),
        ("security group", or_dash(cloud.security_group.clone())),
        ("administrator", cloud.admin_user.clone()),
        ("machines are named", format!("{} from {}", catalog.name_rule, catalog.first_number)),
    ]
}
