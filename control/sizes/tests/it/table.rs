//! Tests tables of sizes: the contents of the built-in table, and messages about invalid tables.

use headwater_sizes::size::GIB;
use headwater_sizes::{OsDiskPlace, SizeTable};

/// The built-in table as text.
const TEXT: &str = include_str!("../../src/azure-sizes.csv");

/// The line with the names of the columns.
fn heading() -> &'static str {
    TEXT.lines().find(|line| !line.starts_with('#')).expect("a heading")
}

/// A line of the built-in table.
fn line_of(name: &str) -> &'static str {
    TEXT.lines().find(|line| line.starts_with(&format!("{name},"))).expect("a size")
}

#[test]
fn the_built_in_table_has_a_source_and_a_date() {
    let table = SizeTable::built_in();
    assert_eq!(table.sizes.len(), 135);
    assert_eq!(table.date.expect("a day").to_string(), "2026-11-28");
    assert!(table.source.expect("a source").contains("Resource SKUs API"));
    assert!(table.sizes.iter().all(|size| !size.source.is_empty() && !size.generations.is_empty()));
}

#[test]
fn figures_keep_their_units() {
    let table = SizeTable::built_in();
    let size = table.size("standard_d128ds_V6").expect("in any case");
    // Azure's API reports NvmeDiskSizeInMiB 7208960, NvmeSizePerDiskInMiB 1802240.
    let disks = size.nvme.expect("NVMe disks");
    assert_eq!((disks.total_bytes(), disks.each_bytes), (7_208_960 << 20, 1_802_240 << 20));
    assert_eq!(size.nvme_read.bytes_per_second, Some(11_520_000_000));
    // Azure's API reports CachedDiskBytes 92341796864.
    assert_eq!(table.size("DS2_v2").expect("without Standard_").cache_bytes, Some(92_341_796_864));
    assert_eq!(table.size("M8-2ms").expect("a size").memory_bytes, 218 * GIB + 3 * GIB / 4);
    assert_eq!(table.size("B2ms").expect("a size").uncached.bytes_per_second, Some(22_500_000));
    // A figure that is not published is not zero.
    assert_eq!(table.size("D8ds_v5").expect("a size").cache_bytes, None);
    assert_eq!(table.size("D8ds_v6").expect("a size").cache_bytes, Some(0));
    assert_eq!(table.size("E4d_v5").expect("a size").places, [OsDiskPlace::Cache, OsDiskPlace::Temp]);
    assert!(table.sizes.iter().all(|size| size.micro_usd_per_hour.is_none()));
}

#[test]
fn a_table_may_have_prices_quotes_and_another_order() {
    let (line, mut names) = (line_of("Standard_D8ds_v5"), heading().split(',').collect::<Vec<_>>());
    let mut fields: Vec<String> = line.split(',').map(str::to_owned).collect();
    *fields.last_mut().expect("a note") = "\"a \"\"note\"\", with a comma\"".to_owned();
    names.insert(0, "usd_per_hour");
    fields.insert(0, "0.452".to_owned());
    let last = names.len() - 1;
    names.swap(1, last);
    fields.swap(1, last);
    let table =
        SizeTable::parse(&format!("# mine\r\n{}\r\n\n{}\r\n", names.join(","), fields.join(","))).unwrap();
    let size = &table.sizes[0];
    assert_eq!((size.name.as_str(), size.micro_usd_per_hour), ("Standard_D8ds_v5", Some(452_000)));
    assert_eq!(size.note, "a \"note\", with a comma");
    assert_eq!((table.source, table.date), (None, None));
}

#[test]
fn a_wrong_field_is_named_with_line_character_and_column() {
    let good = line_of("Standard_D8ds_v6");
    for (from, to, place) in [
        (",8,8,32,", ",eight,8,32,", "line 3, character 24 (vcpus): 'eight' is not a number"),
        (",8,8,32,", ",,8,32,", "line 3, character 24 (vcpus): the field is empty"),
        (",8,8,32,", ",8,9,32,", "line 3, character 26 (vcpus_available): the size has only 8"),
        (",8,8,32,", ",8,8,-32,", "line 3, character 28 (memory_gib): '-32' is not a number"),
        (",8,8,32,", ",8,8,3.2.1,", "(memory_gib): '3.2.1'"),
        (",8,8,32,", ",8,8,1e3,", "(memory_gib): '1e3'"),
        (",8,8,32,", ",8,8,99999999999999999999,", "(memory_gib): '99999999999999999999'"),
        (",x64,", ",x86,", "(architecture): 'x86' is neither"),
        (",1,440,440,", ",2,440,440,", "(nvme_gib_total): the value is not nvme_disks times"),
        (
            ",1,440,440,",
            ",1,440,,",
            "(nvme_disks): nvme_disks, nvme_gib_each and nvme_gib_total are given together",
        ),
        (",150000,", ",150 000,", "(nvme_read_iops): '150 000' is not a whole number"),
        (",yes,NvmeDisk,", ",Yes,NvmeDisk,", "(ephemeral): 'Yes' is neither yes nor no"),
        (",yes,NvmeDisk,", ",no,NvmeDisk,", "(placements): a size without ephemeral"),
        (",yes,NvmeDisk,", ",yes,NvmeDisk|Nvme,", "(placements): there is no placement 'Nvme'"),
        (",yes,NvmeDisk,", ",yes,NvmeDisk|NvmeDisk,", "(placements): 'NvmeDisk' occurs twice"),
        (",yes,2,", ",yes,,", "(hyperv_generations): there is no generation ''"),
        (",yes,2,,", ",yes,2,2026-13-01,", "(retired): '2026-13-01' is not a date"),
        ("Standard_D8ds_v6", "D8 ds", "line 3, character 1 (size): 'D8 ds' is not a name"),
        (",8,8,32,", ",8,32,", "line 3: the line has 25 fields, but there are 26 columns"),
        ("Standard_D8ds_v6", "\"Standard_D8ds_v6", "line 3: character 1: a quote is not closed"),
        ("Standard_D8ds_v6", "\"Standard\"_D8", "line 3: character 1: there is text after the closing quote"),
        (",x64,", ",x\"64,", "line 3: character 31: a quote in the middle"),
    ] {
        let changed = good.replacen(from, to, 1);
        assert_ne!(changed, good, "{from}");
        let why = SizeTable::parse(&format!("# a comment\n{}\n{changed}\n", heading())).expect_err(to);
        assert!(why.to_string().contains(place), "{to}: {why}");
    }
}

#[test]
fn an_invalid_table_is_refused() {
    let good = line_of("Standard_D8ds_v6");
    let wrong = |text: String, words: &str| {
        let why = SizeTable::parse(&text).expect_err(words).to_string();
        assert!(why.contains(words), "{why}");
    };
    wrong(String::new(), "the table has no sizes");
    wrong(format!("{}\n", heading()), "the table has no sizes");
    wrong("hello\n".to_owned(), "line 1, character 1 (hello): there is no column 'hello'");
    wrong(format!("{}\n{good}", heading().replace(",vcpus,", ",")), "line 1: the column 'vcpus' is missing");
    wrong(format!("{},note\n{good}", heading()), "the column 'note' occurs twice");
    wrong(format!("# date: 28.11.2026\n{}\n{good}", heading()), "line 1: '28.11.2026' is not a date");
    wrong(
        format!("{}\n{good}\n{good}\n", heading()),
        "line 3, character 1 (size): the size 'Standard_D8ds_v6' is already in the table",
    );
    let many: String =
        (0..=10_000).map(|n| good.replacen("Standard_D8ds_v6", &format!("S{n}"), 1) + "\n").collect();
    wrong(format!("{}\n{many}", heading()), "more than 10000 sizes");
    wrong(format!("{}\n{}\n", heading(), "x".repeat(70_000)), "longer than 65536 bytes");
}
