//! A table of study 004, which compares a cloud disk with an ephemeral disk: where an OS disk of 127 GiB goes on the
//! study's machine sizes and on one newer size, and the write rates there. Unlike the default of `headwater size advise`,
//! managed disks are allowed.

use headwater_report::page::Column;
use headwater_sizes::{Date, OsDiskPlace, Question, SizeTable, place, size::GIB, size::gib};

use crate::bundle::Table;

/// The size of the study's OS disk.
const OS_DISK_BYTES: u64 = 127 * GIB;

/// The sizes that the study compares, and a newer size with a local disk, `D8ds_v5`.
const SIZES: [&str; 5] = ["D8s_v3", "DS3_v2", "NV12", "D8s_v4", "D8ds_v5"];

/// The table. Sizes that are retired today are placed too: the date of the question is 1970, before every retirement.
pub fn table() -> Table {
    let table = SizeTable::built_in();
    let question = Question::about(OS_DISK_BYTES, Date::of_seconds(0));
    let space = |bytes: Option<u64>| bytes.map_or("not published".into(), gib);
    let rows = SIZES.iter().filter_map(|name| table.size(name)).map(|size| {
        let placed = place::place(size, &question).ok();
        let shown = |value: Option<u64>| {
            value.map_or("-".into(), |value| headwater_report::number::grouped(value as f64))
        };
        let rate = placed.as_ref().map(|placed| placed.write).unwrap_or_default();
        vec![
            size.name.clone(),
            space(size.capacity_bytes(OsDiskPlace::Cache)),
            space(size.capacity_bytes(OsDiskPlace::Temp)),
            placed.map_or("nowhere".into(), |placed| placed.place.to_string()),
            shown(rate.iops),
            shown(rate.bytes_per_second.map(|bytes| bytes / 1_000_000)),
        ]
    });
    Table {
        caption: "Where an OS disk of 127 GiB goes, by size".into(),
        head: vec![
            Column::Text("Size"),
            Column::Figure("Cache"),
            Column::Figure("Temp disk"),
            Column::Text("OS disk"),
            Column::Figure("IOPS there"),
            Column::Figure("MB/s there"),
        ],
        rows: rows.collect(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn placements_agree_with_the_study() {
        let rows = table().rows;
        let found: Vec<(&str, &str)> = rows.iter().map(|row| (row[0].as_str(), row[3].as_str())).collect();
        let expected = [
            ("Standard_D8s_v3", "cache"),
            ("Standard_DS3_v2", "cache"),
            ("Standard_NV12", "managed"),
            ("Standard_D8s_v4", "managed"),
        ];
        assert_eq!(found[..4], expected);
        assert_eq!(rows[0][4..], ["16,000", "128"]);
    }
}
