//! `headwater size` and `headwater scheme`: tables for people, JSON for programs, refusals with what to do. No daemon runs.

use std::path::Path;

use serde_json::Value;

use crate::support::{Ran, headwater, run, short_dir};

fn advise(args: &[&str]) -> Ran {
    run(headwater().args(["size", "advise"]).args(args))
}

fn check(args: &[&str]) -> Ran {
    run(headwater().args(["scheme", "check", "--os-disk", "127G"]).args(args))
}

/// The words of a line that begins with this one.
fn line<'a>(text: &'a str, first: &str) -> Vec<&'a str> {
    let found = text.lines().find(|line| line.split_whitespace().next() == Some(first));
    found.unwrap_or_else(|| panic!("no line of {first} in {text}")).split_whitespace().collect()
}

const EPHEMERAL: [&str; 5] = ["--size", "Standard_D8ds_v5", "--managed-disks", "--gallery", "--ephemeral"];

#[test]
fn advice_lists_places_and_what_is_left() {
    let out = advise(&["--os-disk", "127G", "--vcpus", "8"]).ok();
    let cells = "Standard_D8s_v3 8 32 GiB cache 200 GiB 64 GiB 0 GiB 16000 128 1, 2 -";
    assert_eq!(line(&out, "Standard_D8s_v3").join(" "), cells);
    let cells = "Standard_D8ds_v5 8 32 GiB temp 300 GiB 173 GiB 0 GiB 38000 500 1, 2 -";
    assert_eq!(line(&out, "Standard_D8ds_v5").join(" "), cells);
    assert!(!out.contains("Standard_D4ds_v5 "), "{out}");
    assert!(out.contains("too few vCPUs") && out.contains("no ephemeral OS disks"), "{out}");
    assert!(out.contains("135 sizes, as of 2026-11-28: Microsoft's documents"), "{out}");
    assert!(out.contains("larger sizes, which --all shows"), "{out}");
    let all = advise(&["--os-disk", "127G", "--vcpus", "8", "--all"]).ok();
    assert_eq!(line(&all, "Standard_D4ds_v5").join(" "), "Standard_D4ds_v5 4 of 8 vCPUs");
    assert_eq!(all.lines().filter(|line| line.starts_with("Standard_")).count(), 135);
}

#[test]
fn advice_for_programs_has_each_size_and_reason() {
    let args = [
        "--os-disk",
        "128G",
        "--places",
        "cache,temp,managed",
        "--temp-left",
        "33G",
        "--generation",
        "1",
        "--json",
    ];
    let report: Value = serde_json::from_str(&advise(&args).ok()).unwrap();
    let list = |name: &str| report[name].as_array().expect(name).clone();
    assert_eq!(list("fitting").len() + list("others").len(), 135);
    let of =
        |name: &str| list("fitting").into_iter().find(|entry| entry["size"]["name"] == name).expect(name);
    let found = of("Standard_B20ms");
    assert_eq!(
        (&found["placement"]["place"], &found["size"]["cache_bytes"]),
        (&"managed".into(), &(30_u64 << 30).into())
    );
    assert_eq!(of("Standard_D8ds_v5")["size"]["cache_bytes"], Value::Null);
    let gen2 = list("others").into_iter().find(|entry| entry["size"] == "Standard_D8ds_v6").expect("refused");
    assert_eq!(gen2["reasons"]["size"][0]["kind"], "other_generation");
    assert_eq!(report["question"]["image"]["os_disk_bytes"], 128_u64 << 30);
    assert_eq!(report["table"]["date"], "2026-11-28");
}

#[test]
fn a_disk_that_no_size_holds_is_refused_after_the_reasons() {
    let ran = advise(&["--os-disk", "2041G"]);
    assert!(ran.out.contains("the disk is larger than any OS disk at these places"), "{ran:?}");
    ran.fails(
        2,
        &["no size of the table holds an OS disk of 2041 GiB, on cache, temp or nvme", "more places"],
    );
    advise(&["--os-disk", "2041G", "--places", "managed"]).ok();
    advise(&["--os-disk", "100000M"])
        .fails(2, &["104857600000 bytes", "whole GiB", "write for instance 98G"]);
    let twice = advise(&["--os-disk", "30G", "--places", "temp,temp"]);
    twice.fails(2, &["the place temp is named twice"]);
    let trusted = advise(&["--os-disk", "30G", "--trusted-launch", "--generation", "1"]);
    trusted.fails(2, &["trusted launch needs an image of generation 2", "UEFI"]);
    for args in [
        &["size", "advise"][..],
        &["size", "advise", "--os-disk", "30G", "--places", "tape"],
        &["size", "advise", "--os-disk", "30G", "--generation", "3"],
        &["size", "advise", "--os-disk", "30G", "--vcpus", "0"],
        &["scheme", "check", "--os-disk", "30G"],
        &["scheme", "check", "x.toml", "--os-disk", "30G", "--gallery"],
    ] {
        assert_eq!(run(headwater().args(args)).code, 2, "{args:?}");
    }
}

/// A table of one size, whose line is changed.
fn table(dir: &Path, change: impl FnOnce(String) -> String) -> String {
    let built_in = include_str!("../../../control/sizes/src/azure-sizes.csv");
    let mut lines =
        built_in.lines().filter(|line| line.starts_with("size,") || line.starts_with("Standard_D8ds_v5,"));
    let (heading, line) = (lines.next().expect("a heading"), lines.next().expect("a size"));
    let path = dir.join("sizes.csv");
    std::fs::write(&path, change(format!("{heading},usd_per_hour\n{line},0.452\n"))).expect("a file");
    path.into_os_string().into_string().expect("a name")
}

#[test]
fn another_table_brings_its_sizes_and_prices() {
    let dir = short_dir();
    let mine = table(dir.path(), |text| format!("# source: our region\n{text}"));
    let out = advise(&["--os-disk", "127G", "--sizes", &mine]).ok();
    assert_eq!(line(&out, "Standard_D8ds_v5").last(), Some(&"0.452"));
    assert!(out.contains("1 sizes, without a date: our region"), "{out}");
    let broken = table(dir.path(), |text| text.replace(",38000,", ",many,"));
    let ran = advise(&["--os-disk", "127G", "--sizes", &broken]);
    ran.fails(
        2,
        &[
            "cannot read the sizes",
            "sizes.csv: line 2, character 43 (cached_temp_iops): 'many' is not a whole number",
        ],
    );
    std::fs::write(&mine, [0xff, 0xfe]).unwrap();
    advise(&["--os-disk", "127G", "--sizes", &mine]).fails(2, &["not text in UTF-8"]);
    advise(&["--os-disk", "127G", "--sizes", "/dev/zero"]).fails(2, &["more than 4.0 MiB"]);
    advise(&["--os-disk", "127G", "--sizes", "/no/such"]).fails(3, &["cannot read the sizes /no/such"]);
    check(&[&EPHEMERAL[..], &["--sizes", "/no/such"]].concat()).fails(3, &["cannot read the sizes /no/such"]);
}

#[test]
fn a_scheme_is_checked_the_same_from_options_and_a_file() {
    let more = [
        "--backup-size",
        "Standard_D8ads_v5",
        "--backup-size",
        "D16ds_v6",
        "--places",
        "temp,nvme",
        "--page-file",
        "temp",
    ];
    let options = check(&[&EPHEMERAL[..], &more].concat()).ok();
    assert_eq!(
        line(&options, "Standard_D8ds_v5").join(" "),
        "Standard_D8ds_v5 first temp 300 GiB 173 GiB 0 GiB 38000 500"
    );
    assert_eq!(
        line(&options, "Standard_D16ds_v6").join(" "),
        "Standard_D16ds_v6 backup nvme 880 GiB 0 GiB 440 GiB 150000 720"
    );
    assert!(options.contains("warning: the NVMe disks of Standard_D16ds_v6 are raw"), "{options}");
    let dir = short_dir();
    let file = dir.path().join("pool-a.toml");
    let text = "# A pool.\nsize = 'Standard_D8ds_v5'\nbackup-size = ['Standard_D8ads_v5', 'D16ds_v6']\nmanaged-disks = true\n\
                gallery = true\nephemeral = true\nplaces = ['temp', 'nvme']\npage-file = 'temp'\n";
    std::fs::write(&file, text).unwrap();
    let file = file.to_str().unwrap();
    assert_eq!(check(&[file]).ok(), options);
    std::fs::write(file, text.replace("'nvme'", "'tape'")).unwrap();
    check(&[file])
        .fails(2, &["cannot read the scheme", "pool-a.toml: line 7, character 19: unknown variant `tape`"]);
    check(&["/no/such.toml"]).fails(3, &["cannot read the scheme /no/such.toml"]);
}

#[test]
fn a_scheme_that_cannot_be_is_refused_with_what_to_do() {
    let d8 = ["--size", "Standard_D8ds_v5"];
    let with = |more: &[&str]| check(&[&d8[..], more].concat());
    with(&["--ephemeral"])
        .fails(2, &["ephemeral needs managed-disks and gallery", "(add managed-disks and gallery, or leave"]);
    with(&["--ephemeral", "--managed-disks"]).fails(2, &["ephemeral needs gallery", "add gallery"]);
    with(&["--managed-disks", "--zones", "1,4"]).fails(2, &["zones are 1, 2 and 3"]);
    check(&["--size", "D8ds_v9", "--managed-disks"])
        .fails(3, &["no size 'D8ds_v9'", "similar sizes: Standard_D8ds_v4"]);
    let local = ["--managed-disks", "--gallery", "--ephemeral"];
    let small = [&["--size", "Standard_D4ds_v5", "--full-copy"][..], &local].concat();
    check(&small).fails(2, &["a full copy needs 8 vCPUs, it has 4", "leave full-copy out"]);
    let bios = [&["--size", "Standard_D8ds_v6", "--generation", "1"][..], &local].concat();
    let ran = check(&bios);
    assert_eq!(line(&ran.out, "Standard_D8ds_v6"), ["Standard_D8ds_v6", "first", "none"]);
    ran.fails(2, &["boots only generation 2, the image is of generation 1"]);
    let json = check(&[&bios[..], &["--json"]].concat());
    let report: Value = serde_json::from_str(&json.out).unwrap();
    let problem: Value = serde_json::from_str(&json.err).unwrap();
    assert_eq!((json.code, &problem["kind"]), (2, &"invalid".into()));
    assert_eq!(report["landings"][0]["reasons"]["size"][0]["kind"], "other_generation");
    assert!(problem["advice"].as_str().unwrap().contains("UEFI"), "{problem}");
}
