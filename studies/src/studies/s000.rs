//! Study 000: the calculation by which a study of 2014 converts IOPS to numbers of disks, with its published figures.
//! The study is ESG Lab's, of the "RAM cache with overflow" of Citrix Provisioning Services 7.1 (`docs/studies.md`).
//!
//! The measured part of the study is in [`super::lifecycle`].

use headwater_report::number::grouped;
use headwater_report::page::{Column, text_table};

/// IOPS of a 15k SAS disk, according to the study.
const DISK_IOPS: f64 = 180.0;

/// The fewest disks of a RAID 5 set.
const LEAST_DISKS: f64 = 3.0;

/// The share of writes for which the penalty of RAID 5 is computed. It is an assumption of this program: the published study
/// leaves this penalty out.
const WRITE_SHARE: f64 = 0.9;

/// A platform, with the published figures for 500 users.
#[derive(Clone, Copy, Debug)]
pub struct Platform {
    /// Product and hypervisor.
    pub name: &'static str,
    /// 95th percentile of IOPS with a cache on disk.
    pub disk_p95_iops: f64,
    /// 95th percentile of IOPS with a cache in RAM with overflow.
    pub ram_p95_iops: f64,
    /// Published numbers of disks: with the cache on disk, with the cache in RAM.
    pub published_disks: (u32, u32),
    /// Published saving, in percent.
    pub published_saving_percent: u32,
}

/// The four platforms.
pub const PLATFORMS: [Platform; 4] = [
    platform("XenDesktop, Hyper-V", 7455.0, 133.0, (41, 3), 93),
    platform("XenDesktop, vSphere", 4968.0, 73.0, (28, 3), 89),
    platform("XenApp, Hyper-V", 6788.0, 1538.0, (38, 9), 77),
    platform("XenApp, vSphere", 5850.0, 4268.0, (33, 24), 27),
];

const fn platform(
    name: &'static str,
    disk_p95_iops: f64,
    ram_p95_iops: f64,
    published_disks: (u32, u32),
    published_saving_percent: u32,
) -> Platform {
    Platform { name, disk_p95_iops, ram_p95_iops, published_disks, published_saving_percent }
}

/// The number of disks for this many IOPS: rounded half up, and at least those of a RAID 5 set.
pub fn disks(p95_iops: f64) -> u32 {
    (p95_iops / DISK_IOPS + 0.5).floor().max(LEAST_DISKS) as u32
}

/// The number of disks with a factor that the study ignores: on RAID 5 a small write costs four disk operations.
pub fn disks_with_raid5_penalty(p95_iops: f64) -> u32 {
    let operations = (1.0 - WRITE_SHARE) + WRITE_SHARE * 4.0;
    disks(p95_iops * operations)
}

/// The saving in percent. It is computed from the unrounded numbers of disks: with the published numbers, the third
/// would be 76.
pub fn saving_percent(disk_p95_iops: f64, ram_p95_iops: f64) -> u32 {
    let disks = |iops: f64| iops / DISK_IOPS;
    ((1.0 - disks(ram_p95_iops).max(LEAST_DISKS) / disks(disk_p95_iops)) * 100.0).round() as u32
}

/// The table as text: computed next to published figures.
pub fn text() -> String {
    let head = [
        Column::Text("500 users"),
        Column::Figure("p95 IOPS, disk"),
        Column::Figure("disks (published)"),
        Column::Figure("p95 IOPS, RAM"),
        Column::Figure("disks (published)"),
        Column::Figure("saving (published)"),
        Column::Figure("RAID 5 disks, disk / RAM"),
    ];
    let row = |platform: &Platform| {
        let (disk, ram) = (platform.disk_p95_iops, platform.ram_p95_iops);
        let (published_disk, published_ram) = platform.published_disks;
        let saving = saving_percent(disk, ram);
        vec![
            platform.name.into(),
            grouped(disk),
            format!("{} ({published_disk})", disks(disk)),
            grouped(ram),
            format!("{} ({published_ram})", disks(ram)),
            format!("{saving} % ({} %)", platform.published_saving_percent),
            format!("{} / {}", disks_with_raid5_penalty(disk), disks_with_raid5_penalty(ram)),
        ]
    };
    let rows: Vec<Vec<String>> = PLATFORMS.iter().map(row).collect();
    format!(
        "Study 000 (2014): disks for the write caches of 500 users. Arithmetic only: nothing is measured.\n\n{}\n\
         disks = p95 / 180, rounded, at least 3. saving = 1 - max(3, p95 RAM / 180) / (p95 disk / 180).\n\
         The last column is left out by the study: at 90 % writes a disk of a RAID 5 set does 180 / 3.7 = 48.6 IOPS.\n",
        text_table(&head, &rows)
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn all_published_disks_and_savings_follow_from_the_published_iops() {
        for platform in PLATFORMS {
            let (disk, ram) = (platform.disk_p95_iops, platform.ram_p95_iops);
            assert_eq!((disks(disk), disks(ram)), platform.published_disks, "{}", platform.name);
            assert_eq!(saving_percent(disk, ram), platform.published_saving_percent, "{}", platform.name);
        }
    }

    #[test]
    fn the_penalty_of_raid_5_almost_quadruples_the_disks() {
        let found = PLATFORMS.map(|platform| disks_with_raid5_penalty(platform.disk_p95_iops));
        assert_eq!(found, [153, 102, 140, 120]);
    }

    #[test]
    fn the_table_has_published_and_computed_figures() {
        let text = text();
        assert!(text.contains("38 (38)") && text.contains("77 % (77 %)"), "{text}");
    }
}
