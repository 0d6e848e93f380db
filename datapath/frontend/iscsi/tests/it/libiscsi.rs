//! libiscsi's own suite, `iscsi-test-cu`: each of its tests in a process of its own, with a time limit.
//!
//! In one process the suite can loop for ever when a session ends during a test, and one failure would hide
//! others. A test's output counts, not only its exit code: `docs/iscsi.md` lists each test that skips itself
//! with its reason, and that list must equal the one found here.
//!
//! All tests run on a disk that answers at once. Those of commands that use the disk also run on one that
//! answers later.

use std::collections::{BTreeMap, BTreeSet};
use std::process::{Command, Stdio};
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use crate::fixture::Fixture;
use headwater_testkit::{ReferenceDisk, ReferenceOptions, Waits, run};

/// The time limit of one test, reached only if something hangs. The longest takes some seconds.
const LIMIT: Duration = Duration::from_secs(60);

/// How many of libiscsi 1.19's tests there are.
const TESTS: usize = 230;

/// The suite writes up to 65,536 blocks if the disk has as many. This disk has more, so that no test does
/// less than on a real disk.
const DISK_BYTES: u64 = 64 << 20;

/// How the names of the tests begin whose commands read or write the disk.
const OF_DATA: [&str; 11] = [
    "CompareAndWrite",
    "GetLBAStatus",
    "OrWrite",
    "Prefetch",
    "Read1",
    "Read6",
    "Unmap",
    "Verify",
    "Write",
    "iSCSIResiduals",
    "iSCSIdatasn",
];

/// At least this many must pass rather than be skipped.
const PASS: usize = 190;

#[derive(Clone, Debug, PartialEq, Eq)]
enum Verdict {
    Passed,
    Skipped(String),
    Failed(String),
}

#[test]
fn all_tests_of_the_suite_pass_or_skip_themselves() {
    let list = run("libiscsi-bin", "iscsi-test-cu", &["--list"]);
    let names: Vec<&str> = list
        .lines()
        .map(str::trim)
        .filter(|line| line.starts_with("ALL.") && line.matches('.').count() == 2)
        .collect();
    assert_eq!(names.len(), TESTS, "the suite is of another version than 1.19");
    let wanted = std::env::var("HEADWATER_ISCSI_TESTS").ok();
    let names: Vec<&str> =
        names.into_iter().filter(|name| wanted.as_ref().is_none_or(|wanted| name.contains(wanted))).collect();
    let verdicts = judge_all(&names, Waits::Never);
    let of_data = |name: &&str| OF_DATA.iter().any(|group| name["ALL.".len()..].starts_with(group));
    let data_names: Vec<&str> = names.iter().copied().filter(of_data).collect();
    let waited = judge_all(&data_names, Waits::Always);
    let differs = waited.iter().filter(|(name, verdict)| verdicts.get(*name) != Some(verdict));
    let differs: Vec<_> = differs.map(|(name, verdict)| format!("{name}: {verdict:?}")).collect();
    println!("{} of them once more on a disk that lets each request wait", waited.len());
    let failed: Vec<_> = verdicts.iter().filter(|(_, v)| matches!(v, Verdict::Failed(_))).collect();
    let skipped: Vec<_> = verdicts.iter().filter(|(_, v)| matches!(v, Verdict::Skipped(_))).collect();
    let passed = verdicts.len() - failed.len() - skipped.len();
    println!("{passed} passed, {} skipped, {} failed", skipped.len(), failed.len());
    for (name, verdict) in skipped.iter().chain(&failed) {
        println!("{name}: {verdict:?}");
    }
    assert!(failed.is_empty(), "{} tests of libiscsi failed, see above", failed.len());
    assert!(differs.is_empty(), "on a disk that lets requests wait: {differs:#?}");
    let skipped: BTreeSet<_> =
        skipped.iter().map(|(name, _)| name.trim_start_matches("ALL.").to_owned()).collect();
    let (counts, documented) = documented();
    let missing: Vec<_> = skipped.difference(&documented).collect();
    assert!(missing.is_empty(), "docs/iscsi.md does not say why these are skipped: {missing:?}");
    if wanted.is_none() {
        assert!(passed >= PASS, "only {passed} tests passed");
        let gone: Vec<_> = documented.difference(&skipped).collect();
        assert!(gone.is_empty(), "docs/iscsi.md says that these are skipped, and they are not: {gone:?}");
        assert_eq!(
            counts,
            format!("{passed} pass, none fails, {} cannot run:", skipped.len()),
            "docs/iscsi.md"
        );
    }
}

/// Runs these tests, each on a disk of its own.
fn judge_all(names: &[&str], waits: Waits) -> BTreeMap<String, Verdict> {
    let verdicts = Mutex::new(BTreeMap::new());
    let next = AtomicUsize::new(0);
    // Most tests sleep somewhere.
    std::thread::scope(|scope| {
        for _ in 0..8 {
            scope.spawn(|| {
                while let Some(name) = names.get(next.fetch_add(1, Ordering::Relaxed)) {
                    let options = ReferenceOptions { waits, ..disk_for(name) };
                    let fixture = Fixture::new(ReferenceDisk::with_options(DISK_BYTES, options));
                    let verdict = judge(&fixture, name);
                    verdicts.lock().unwrap().insert((*name).to_string(), verdict);
                }
            });
        }
    });
    verdicts.into_inner().unwrap()
}

/// The results in `docs/iscsi.md`: the line with the numbers, and the tests in the table below it.
fn documented() -> (String, BTreeSet<String>) {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../../../docs/iscsi.md");
    let text = std::fs::read_to_string(path).unwrap();
    let mut lines = text.lines().skip_while(|line| !line.ends_with("cannot run:"));
    let counts = lines.next().expect("a line before the table");
    let counts = counts.split_once(": ").map_or(counts, |(_, counts)| counts).to_owned();
    let rows = lines.skip_while(|line| line.is_empty()).take_while(|line| line.starts_with('|'));
    let names = rows
        .filter_map(|row| row.strip_prefix("| `")?.split_once("` |"))
        .flat_map(|(names, _)| names.split("`, `").map(str::to_owned).collect::<Vec<_>>());
    (counts, names.collect())
}

/// Two tests need a special disk.
fn disk_for(name: &str) -> ReferenceOptions {
    match name {
        // It is skipped on a disk that can be written.
        "ALL.ReadOnly.ReadOnlySBC" => ReferenceOptions { read_only: true, ..ReferenceOptions::default() },
        // It takes a logical block inside a physical one for the start of the next physical one, so it cannot
        // pass if their sizes differ.
        "ALL.GetLBAStatus.UnmapSingle" => {
            ReferenceOptions { logical_block_bytes: 4096, ..ReferenceOptions::default() }
        }
        _ => ReferenceOptions::default(),
    }
}

/// The test that fails on every target.
const NEVER_PASSES: &str = "ALL.iSCSITMF.LUNResetSimpleAsync";

/// libiscsi 1.19 checks the response to its LUN reset before it sends the reset, so the test fails on every
/// target (fixed in 1.20). The rest of its output shows whether the target reset the unit. Nothing else may
/// have failed. The C library may abort the process during the clean-up, because of a damaged heap, before
/// there is a summary.
fn is_known_defect(name: &str, text: &str) -> bool {
    name == NEVER_PASSES
        && text.contains("LU RESET completed")
        && failed_assertions(text) == ["CU_ASSERT_EQUAL(reconnect_succeeded,1)"]
        && summary(text, "tests").is_none_or(|counts| counts == ["1", "1", "0", "1", "0"])
        && summary(text, "asserts").is_none_or(|counts| counts[3] == "1")
}

/// The failed assertions, from CUnit's lines `NUMBER. FILE:LINE  - WHAT`. Output of the clean-up may follow
/// on the same line.
fn failed_assertions(text: &str) -> Vec<&str> {
    text.lines()
        .filter_map(|line| {
            let (number, rest) = line.trim_start().split_once(". ")?;
            let (place, what) = rest.split_once("  - ")?;
            let what = what.split("    ").next().unwrap_or(what);
            (number.parse::<u32>().is_ok() && place.contains(':')).then_some(what.trim_end())
        })
        .collect()
}

/// A line of CUnit's summary, of tests or of assertions: how many there are, ran, passed, failed and are inactive.
fn summary<'a>(text: &'a str, of: &str) -> Option<Vec<&'a str>> {
    text.lines()
        .map(|line| line.split_whitespace().collect::<Vec<_>>())
        .find(|words| words.len() == 6 && words[0] == of)
        .map(|words| words[1..].to_vec())
}

fn judge(fixture: &Fixture, name: &str) -> Verdict {
    let url = fixture.url();
    let output = tempfile::tempfile().unwrap();
    let mut child = Command::new("iscsi-test-cu")
        .args(["--dataloss", "--allow-sanitize", "-V", "--test", name, &url, &url])
        .stdin(Stdio::null())
        .stdout(output.try_clone().unwrap())
        .stderr(output.try_clone().unwrap())
        .spawn()
        .expect("iscsi-test-cu");
    let start = Instant::now();
    let status = loop {
        if let Some(status) = child.try_wait().unwrap() {
            break Some(status);
        }
        if start.elapsed() > LIMIT {
            child.kill().unwrap();
            child.wait().unwrap();
            break None;
        }
        std::thread::sleep(Duration::from_millis(10));
    };
    let mut text = String::new();
    let mut output = output;
    std::io::Seek::rewind(&mut output).unwrap();
    std::io::Read::read_to_string(&mut output, &mut text).unwrap();
    let skipped = text.lines().find(|line| line.contains("[SKIPPED]"));
    // The summary counts; a line with [FAILED] may also be of a command that should fail, or of the clean-up.
    let good = summary(&text, "tests").is_some_and(|counts| counts == ["1", "1", "1", "0", "0"]);
    match (status, skipped) {
        (None, _) => Verdict::Failed(format!("more than {} s\n{text}", LIMIT.as_secs())),
        (Some(_), _) if is_known_defect(name, &text) => {
            Verdict::Skipped("cannot pass: libiscsi 1.19 expects the answer before it asks".into())
        }
        (Some(status), _) if !status.success() || !good => Verdict::Failed(text),
        (Some(_), Some(line)) => {
            let at = line.find("[SKIPPED]").unwrap();
            Verdict::Skipped(line[at + 9..].trim().to_string())
        }
        (Some(_), None) => Verdict::Passed,
    }
}

/// Output of libiscsi for [`NEVER_PASSES`] in which these assertions fail.
fn output_with(failed: &[&str]) -> String {
    let count = failed.len();
    let list: String = (1..)
        .zip(failed)
        .map(|(number, what)| {
            format!("\n    {number}. test_async_lu_reset_simple.c:{}  - {what}", 160 + number)
        })
        .collect();
    let passed = 12 - count;
    format!(
        "

     CUnit - A unit testing framework for C - Version 2.1-3
     http://cunit.sourceforge.net/


Suite: iSCSITMF
  Test: LUNResetSimpleAsync ...
    WRITE10 queued: (CmdSN=0x2, ITT=0x3)
    dispatching out queue...
    dispatched
    WRITE10 successful: (CmdSN=0x2, ITT=0x3)
    LU RESET: TMF response 0 for RefCmdSN=0x2, RefITT=0x3
    LU RESET completed
FAILED{list}

Run Summary:    Type  Total    Ran Passed Failed Inactive
              suites      1      1    n/a      0        0
               tests      1      1      0      1        0
             asserts     12     12     {passed:2}     {count:2}      n/a

Elapsed time =    0.001 seconds
Tests completed with return value: 0
"
    )
}

#[test]
fn the_known_defect_hides_no_other_failure() {
    let known = "CU_ASSERT_EQUAL(reconnect_succeeded,1)";
    let alone = output_with(&[known]);
    assert!(is_known_defect(NEVER_PASSES, &alone), "{alone}");
    assert!(!is_known_defect("ALL.iSCSITMF.AbortTaskSimpleAsync", &alone));
    for failed in [
        &[known, "CU_ASSERT_NOT_EQUAL(status,SCSI_STATUS_CHECK_CONDITION)"][..],
        &["CU_ASSERT_EQUAL(ret,0)", known],
        &[known, known],
        &["CU_ASSERT_EQUAL(ret,0)"],
        &[],
    ] {
        assert!(!is_known_defect(NEVER_PASSES, &output_with(failed)), "{failed:?}");
    }
    // Output that stops during the clean-up.
    let (cut, _) = alone.split_once("\nRun Summary").unwrap();
    let cut = format!(
        "{}    Send PRIN/READ_KEYS\nmalloc(): smallbin double linked list corrupted\n",
        cut.trim_end()
    );
    assert!(is_known_defect(NEVER_PASSES, &cut), "{cut}");
    let two = cut.replace(known, &format!("{known}\n    2. test_async_lu_reset_simple.c:170  - CU_FAIL(x)"));
    assert!(!is_known_defect(NEVER_PASSES, &two), "{two}");
    // A failure that is counted and not listed, and a reset that was not executed.
    for (printed, instead) in [
        ("     11      1      n/a", "     10      2      n/a"),
        ("LU RESET completed", "LU RESET: unexpected TMF response 255"),
    ] {
        let other = alone.replace(printed, instead);
        assert_ne!(other, alone);
        assert!(!is_known_defect(NEVER_PASSES, &other), "{other}");
    }
}
