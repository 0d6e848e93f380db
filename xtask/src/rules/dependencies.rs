//! Rule: packages depend only on the packages that their layer allows. The table has the layers of ARCHITECTURE.md.

use super::Rule;
use crate::source::SourceFile;
use crate::tidy::Finding;

pub const RULE: Rule = Rule {
    name: "dependencies",
    why: "the layers stay exchangeable and testable alone only while dependencies point down: \
          the data path never knows the control plane, and only headwater/ sees both",
    instead: "define a trait in the lower layer (or a type in headwater-block) and implement or wire it in headwater/",
    check,
};

/// Folder of a package (`*`: any one name), and the packages of this workspace on which it may depend. In
/// `[dev-dependencies]` every package may also use [`TEST_AIDS`]. The first matching row counts.
const LAYERS: &[(&str, &[&str])] = &[
    ("admission", &[]),
    ("datapath/attribution", &["headwater-block", "headwater-filesystems"]),
    ("datapath/block", &[]),
    ("datapath/filesystems", &["headwater-block"]),
    ("datapath/frontend/connections", &["headwater-block"]),
    ("datapath/frontend/iscsi", &["headwater-block", "headwater-connections", "headwater-scsi"]),
    ("datapath/frontend/*", &["headwater-block", "headwater-connections"]),
    ("datapath/scsi", &["headwater-block"]),
    ("datapath/recorder", &["headwater-block"]),
    ("datapath/volume", &["headwater-writecache", "headwater-block"]),
    ("datapath/writecache", &["headwater-block"]),
    ("datapath/image", &["headwater-store", "headwater-block", "headwater-filesystems"]),
    ("datapath/store", &[]),
    ("datapath/store_server", &["headwater-store", "headwater-block", "headwater-admission"]),
    ("datapath/remote", &["headwater-store", "headwater-block"]),
    ("control/api", &[]),
    ("control/db", &["headwater-api"]),
    ("control/sizes", &[]),
    ("control/service", &["headwater-api", "headwater-db", "headwater-admission"]),
    ("hosting/*", &[]),
    ("boot/artefacts", &["headwater-image", "headwater-block"]),
    ("boot/server", &["headwater-boot-script", "headwater-dhcp", "headwater-tftp"]),
    // The data path of a target, running in the target. It does not depend on the control plane.
    (
        "boot/agent",
        &[
            "headwater-attach",
            "headwater-block",
            "headwater-boot-script",
            "headwater-dhcp",
            "headwater-image",
            "headwater-nbd",
            "headwater-remote",
            "headwater-store",
            "headwater-volume",
            "headwater-writecache",
        ],
    ),
    ("boot/*", &[]),
    ("testkit", &["headwater-block"]),
    ("testkit/azure", &[]),
    // It replays a guest's reads over a line of the test kit; a tool for developers, not part of the product.
    ("measure", &["headwater-block", "headwater-nbd", "headwater-testkit"]),
    ("report", &[]),
    (
        "studies",
        &[
            "headwater-block",
            "headwater-nbd",
            // The guest of `003 --guest`.
            "headwater-qemu",
            "headwater-recorder",
            "headwater-report",
            "headwater-sizes",
            // A guest's driver, for `--over vhost-user`.
            "headwater-testkit",
            "headwater-vhost-user",
            "headwater-volume",
            "headwater-writecache",
        ],
    ),
    ("fuzz", &["*"]),
    ("headwater", &["*"]),
    ("xtask", &[]),
];

/// Packages that tests of every package may use.
const TEST_AIDS: &[&str] = &["headwater-testkit", "headwater-testkit-azure"];

fn check(files: &[SourceFile]) -> Vec<Finding> {
    let mut findings = Vec::new();
    for file in files.iter() {
        let Some(folder) = file.path.strip_suffix("/Cargo.toml") else { continue };
        let Some((_, allowed)) = LAYERS.iter().find(|(pattern, _)| matches(pattern, folder)) else {
            let what =
                format!("package {folder} is not in the table of layers; add it to the table of this rule");
            findings.push(Finding::error(&file.path, 1, what));
            continue;
        };
        for (line, name, is_dev) in dependencies_of(&file.text) {
            if !(name == "headwater" || name.starts_with("headwater-") || name == "xtask") {
                continue;
            }
            let fits = allowed.contains(&name.as_str()) || allowed == &["*"];
            let is_test_aid = is_dev && TEST_AIDS.contains(&name.as_str());
            if !fits && !is_test_aid {
                let may =
                    if allowed.is_empty() { "none of this workspace".into() } else { allowed.join(", ") };
                let what = format!("{folder} depends on {name}; it may depend on {may}");
                findings.push(Finding::error(&file.path, line, what));
            }
        }
    }
    findings
}

fn matches(pattern: &str, folder: &str) -> bool {
    match pattern.strip_suffix("/*") {
        Some(parent) => folder.strip_prefix(parent).is_some_and(|rest| rest.starts_with('/')),
        None => pattern == folder,
    }
}

/// The dependencies of a manifest: line, name, and whether it is only for tests.
pub(super) fn dependencies_of(manifest: &str) -> Vec<(usize, String, bool)> {
    let mut found = Vec::new();
    let mut section = String::new();
    for (index, line) in manifest.lines().enumerate() {
        let line = line.trim();
        if let Some(header) = line.strip_prefix('[') {
            section = header.trim_matches(['[', ']']).to_owned();
            // The long form: `[dependencies.NAME]`.
            if let Some((table, name)) = section.rsplit_once('.').filter(|(t, _)| t.ends_with("dependencies"))
            {
                found.push((index + 1, name.to_owned(), table.ends_with("dev-dependencies")));
            }
        } else if section.ends_with("dependencies") && line.starts_with(|c: char| c.is_alphanumeric()) {
            let name: String =
                line.chars().take_while(|c| c.is_alphanumeric() || matches!(c, '-' | '_')).collect();
            found.push((index + 1, name, section.ends_with("dev-dependencies")));
        }
    }
    found
}

#[cfg(test)]
mod tests {
    use super::{super::lines_found, RULE};

    #[test]
    fn dependencies_point_down() {
        let manifest = "[dependencies]\nheadwater-block.workspace = true\nheadwater-api = { path = \"x\" }\n\
                        [dev-dependencies]\nheadwater-testkit.workspace = true\nheadwater-image.workspace = true\n";
        assert_eq!(lines_found(&RULE, "datapath/frontend/nbd/Cargo.toml", manifest), [3, 6]);
        // A volume gets its image as a `Device`.
        assert_eq!(lines_found(&RULE, "datapath/volume/Cargo.toml", manifest), [3, 6]);
        assert_eq!(lines_found(&RULE, "headwater/Cargo.toml", manifest), []);
    }

    #[test]
    fn only_the_iscsi_front_end_knows_scsi() {
        let manifest = "[dependencies]\nheadwater-block.workspace = true\nheadwater-scsi.workspace = true\n";
        assert_eq!(lines_found(&RULE, "datapath/frontend/iscsi/Cargo.toml", manifest), []);
        for other in ["nbd", "vhost_user", "fuse", "attach"] {
            let path = format!("datapath/frontend/{other}/Cargo.toml");
            assert_eq!(lines_found(&RULE, &path, manifest), [3], "{other}");
        }
        let for_tests = "[dev-dependencies]\nheadwater-scsi.workspace = true\n";
        assert_eq!(lines_found(&RULE, "datapath/frontend/nbd/Cargo.toml", for_tests), [2]);
    }

    #[test]
    fn shared_server_crates_are_below_the_front_ends() {
        let manifest =
            "[dependencies]\nheadwater-connections.workspace = true\nheadwater-nbd.workspace = true\n";
        assert_eq!(lines_found(&RULE, "datapath/frontend/iscsi/Cargo.toml", manifest), [3]);
        assert_eq!(lines_found(&RULE, "datapath/frontend/vhost_user/Cargo.toml", manifest), [3]);
        assert_eq!(lines_found(&RULE, "datapath/frontend/connections/Cargo.toml", manifest), [2, 3]);
        assert_eq!(lines_found(&RULE, "datapath/block/Cargo.toml", manifest), [2, 3]);
    }

    #[test]
    fn test_aids_are_for_tests_and_planes_do_not_mix() {
        let manifest = "[dependencies]\nheadwater-testkit.workspace = true\n";
        assert_eq!(lines_found(&RULE, "datapath/store/Cargo.toml", manifest), [2]);
        let long = "[target.'cfg(unix)'.dependencies.headwater-volume]\nworkspace = true\n";
        assert_eq!(lines_found(&RULE, "control/service/Cargo.toml", long), [1]);
        assert_eq!(lines_found(&RULE, "hosting/qemu/Cargo.toml", long), [1]);
    }

    #[test]
    fn a_new_package_needs_a_place() {
        assert_eq!(lines_found(&RULE, "datapath/extra/Cargo.toml", "[package]\n"), [1]);
        assert_eq!(lines_found(&RULE, "Cargo.toml", "[workspace.dependencies]\nheadwater-api = \"1\"\n"), []);
    }
}
