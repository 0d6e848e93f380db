//! Tests schemes: the placement on each size, warnings, and combinations that are refused.

use headwater_sizes::size::GIB;
use headwater_sizes::{Architecture, Generation, ImageFacts, OsDiskPlace, Scheme, SchemeReport, SizeTable};

use crate::today;

/// Checks a scheme with an ephemeral OS disk and these additional lines.
fn check(more: &str, os_disk_gib: u64, generation: Option<Generation>) -> SchemeReport {
    let size = if more.contains("size = \"") && !more.starts_with("backup") {
        ""
    } else {
        "size = 'Standard_D8ds_v5'\n"
    };
    raw(
        &format!("{size}managed-disks = true\ngallery = true\nephemeral = true\n{more}"),
        os_disk_gib,
        generation,
    )
}

fn raw(text: &str, os_disk_gib: u64, generation: Option<Generation>) -> SchemeReport {
    let scheme = Scheme::parse(text).unwrap_or_else(|why| panic!("{text}: {why}"));
    let image = ImageFacts { os_disk_bytes: os_disk_gib * GIB, generation, architecture: Architecture::X64 };
    scheme.check(image, &SizeTable::built_in(), today())
}

fn warns(report: &SchemeReport, words: &str) -> bool {
    report.warnings.iter().any(|warning| warning.contains(words))
}

#[test]
fn a_scheme_reports_the_placement_on_each_size() {
    let backups = "backup-size = ['Standard_D8ads_v5', 'standard_d8ds_v6', 'D4s_v3']\nfull-copy = false\n";
    let report = check(backups, 127, Some(Generation::Two));
    assert_eq!(report.refusals, []);
    let landed: Vec<_> = report
        .landings
        .iter()
        .map(|landing| {
            (landing.size.as_str(), landing.is_backup, landing.placement.as_ref().map(|found| found.place))
        })
        .collect();
    let expected = [
        ("Standard_D8ds_v5", false, Some(OsDiskPlace::Temp)),
        ("Standard_D8ads_v5", true, Some(OsDiskPlace::Temp)),
        ("Standard_D8ds_v6", true, Some(OsDiskPlace::Nvme)),
        ("Standard_D4s_v3", true, Some(OsDiskPlace::Managed)),
    ];
    assert_eq!(landed, expected);
    assert!(warns(&report, "no effect on Standard_D4s_v3: its OS disk is a managed disk"), "{report:?}");
    assert!(warns(&report, "Standard_D4s_v3 has 6400 IOPS for the OS disk instead of 38000"), "{report:?}");
    assert!(warns(&report, "needs a connection to the cloud"), "{report:?}");
    assert!(!warns(&report, "quota is counted"), "{report:?}");
}

#[test]
fn missing_space_for_page_file_and_scratch_is_warned_of() {
    let temp = "page-file = 'temp'\nscratch = 'temp'\n";
    let report = check(temp, 300, None);
    assert!(
        warns(&report, "page file would be on the OS disk") && warns(&report, "scratch space would be"),
        "{report:?}"
    );
    assert!(!warns(&check(temp, 299, None), "would be on the OS disk"));
    assert!(!warns(&check("", 300, None), "would be on the OS disk"));
    let nvme = check("size = \"Standard_D16ds_v6\"\npage-file = 'temp'\n", 127, None);
    assert!(warns(&nvme, "raw at each start"), "{nvme:?}");
    assert!(warns(&nvme, "boots only images of generation 2"), "{nvme:?}");
    assert!(!warns(&check("size = \"Standard_D16ds_v6\"\n", 127, Some(Generation::Two)), "boots only"));
}

#[test]
fn sizes_that_share_a_quota_are_warned_of() {
    let same = check("backup-size = ['Standard_D16ds_v5']\n", 127, None);
    assert!(warns(&same, "all sizes belong to the series Ddsv5"), "{same:?}");
    assert!(!warns(&check("", 127, None), "all sizes belong to the series"));
}

#[test]
fn a_size_that_is_retired_soon_is_warned_of() {
    let mut table = SizeTable::built_in();
    let size = table.sizes.iter_mut().find(|size| size.name == "Standard_D8ds_v5").unwrap();
    let mut warned_on = |retired: &str| {
        size.retired = headwater_sizes::Date::parse(retired);
        let table = SizeTable { sizes: vec![size.clone()], source: None, date: None };
        let scheme = Scheme { size: "D8ds_v5".to_owned(), managed_disks: true, ..Scheme::default() };
        let image = ImageFacts { os_disk_bytes: 30 * GIB, generation: None, architecture: Architecture::X64 };
        let report = scheme.check(image, &table, today());
        (report.refusals.is_empty(), warns(&report, "is retired on"))
    };
    assert_eq!(warned_on("2027-05-28"), (true, false));
    assert_eq!(warned_on("2027-05-27"), (true, true));
    assert_eq!(warned_on("2026-11-28"), (false, false));
}

#[test]
fn combinations_that_cannot_be_are_refused_with_what_to_do() {
    let size = "size = 'Standard_D8ds_v5'\n";
    for (text, what, advice) in [
        (
            "ephemeral = true",
            "ephemeral needs managed-disks and gallery",
            "add managed-disks and gallery, or",
        ),
        (
            "ephemeral = true\nmanaged-disks = true",
            "ephemeral needs gallery",
            "add gallery, or leave ephemeral out",
        ),
        ("ephemeral = true\ngallery = true", "ephemeral needs managed-disks", "add managed-disks, or"),
        ("gallery = true", "gallery needs managed-disks", "add managed-disks"),
        ("", "managed-disks is missing", "add managed-disks"),
        (
            "managed-disks = true\nplaces = ['cache', 'managed']",
            "places on the host need ephemeral",
            "add ephemeral",
        ),
        ("managed-disks = true\nfull-copy = true", "full-copy needs ephemeral", "add ephemeral"),
        ("managed-disks = true\nzones = [1, 4]", "zones are 1, 2 and 3", "1,2,3"),
        ("managed-disks = true\nzones = [1, 1]", "each may be named once", "1,2,3"),
        (
            "managed-disks = true\nbackup-size = ['D8ds_v5']",
            "the size Standard_D8ds_v5 is named twice",
            "each size once",
        ),
        (
            "managed-disks = true\nplaces = ['managed', 'managed']",
            "the place managed is named twice",
            "each place once",
        ),
    ] {
        let report = raw(&format!("{size}{text}"), 127, None);
        assert_eq!((report.refusals.len(), report.landings.len()), (1, 0), "{text}: {report:?}");
        let refusal = &report.refusals[0];
        assert!(refusal.what.contains(what) && refusal.advice.contains(advice), "{text}: {refusal:?}");
    }
    let only_managed = check("places = ['managed']", 127, None);
    assert!(
        only_managed.refusals[0].what.contains("ephemeral needs a place on the host"),
        "{only_managed:?}"
    );
    let many: Vec<String> = (0..17).map(|n| format!("'S{n}'")).collect();
    let report = raw(&format!("{size}managed-disks = true\nbackup-size = [{}]", many.join(",")), 127, None);
    assert!(report.refusals[0].what.contains("17 backup sizes; the maximum is 16"), "{report:?}");
}

#[test]
fn sizes_that_do_not_hold_the_disk_are_refused_with_what_to_do() {
    let refused = |more: &str, os_disk_gib, generation, what: &str, advice: &str| {
        let report = check(more, os_disk_gib, generation);
        let found = report
            .refusals
            .iter()
            .any(|refusal| refusal.what.contains(what) && refusal.advice.contains(advice));
        assert!(found, "{more}: {report:?}");
        // The other sizes are reported nevertheless.
        assert!(report.landings.iter().any(|landing| landing.reasons.is_some()), "{report:?}");
    };
    refused("size = \"D8ds_v6\"\n", 30, Some(Generation::One), "boots only generation 2", "UEFI");
    refused(
        "size = \"D4ds_v5\"\nfull-copy = true\n",
        30,
        None,
        "a full copy needs 8 vCPUs, it has 4",
        "leave full-copy out",
    );
    refused(
        "places = ['cache', 'temp']\n",
        301,
        None,
        "temp: has 300 GiB, needs 301 GiB",
        "add managed to places",
    );
    refused("", 4096, None, "the largest OS disk at this place has 4095 GiB", "make the OS disk smaller");
    refused(
        "backup-size = ['D16plds_v5']\n",
        30,
        None,
        "the backup size Standard_D16plds_v5",
        "another backup size",
    );
}

#[test]
fn an_unknown_size_is_refused_with_similar_names() {
    let report = raw("size = 'Standard_D8ds_v9'\nmanaged-disks = true", 30, None);
    let refusal = &report.refusals[0];
    assert!(refusal.is_not_found && refusal.what.contains("no size 'Standard_D8ds_v9'"), "{refusal:?}");
    assert!(refusal.advice.contains("Standard_D8ds_v4, Standard_D8ds_v5, Standard_D8ds_v6"), "{refusal:?}");
    for odd in ["", "_", "Standard_", "\u{fc}\u{fc}"] {
        let report = raw(&format!("size = '{odd}'\nmanaged-disks = true"), 30, None);
        assert!(
            report.refusals[0].is_not_found && report.refusals[0].advice.contains("size advise"),
            "{report:?}"
        );
    }
}

#[test]
fn an_invalid_file_is_refused_with_line_and_character() {
    for (text, place) in [
        ("size = 'x'\nephemerl = true\n", "line 2, character 1: unknown field `ephemerl`"),
        ("size = 'x'\nplaces = ['cache', 'tape']\n", "line 2, character 20: unknown variant `tape`"),
        ("size = 'x'\n\u{fc} = 1\n", "line 2, character 1:"),
        ("size = 'x'\nzones = [1, 300]\n", "line 2, character 13:"),
        ("size = 5\n", "line 1, character 8: invalid type"),
        ("ephemeral = true\n", "missing field `size`"),
        ("size = 'x'\nsize = 'y'\n", "line 2, character 1: duplicate key"),
        ("size = \"x\n", "line 1, character"),
    ] {
        let why = Scheme::parse(text).expect_err(text).to_string();
        assert!(why.contains(place), "{text}: {why}");
    }
}
