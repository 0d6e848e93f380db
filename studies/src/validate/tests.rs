//! Tests validation with recordings of the model and with handmade ones.

use headwater_recorder::format::Writer;
use headwater_recorder::{Content, Entry, Kind as RecordedKind, Record};

use super::figures::distance;
use super::*;
use crate::guest::phases_text;
use crate::trace::Kind as Operation;

/// A model whose run takes a second.
fn small() -> Profile {
    Profile::standard().unwrap().with(&[
        ("boot_writes", 800.0),
        ("logon_writes", 200.0),
        ("loop_seconds", 200.0),
        ("copy_files", 6.0),
        ("copy_file_bytes", 4e6),
        ("copy_kept_seconds", 150.0),
    ])
}

/// Writes a recording of a desktop, and its phases.
fn record(dir: &Path, number: usize, desktop: &Desktop) -> PathBuf {
    let path = dir.join(format!("desk-{number}.rec"));
    let mut writer = Writer::new(std::fs::File::create(&path).unwrap(), 0, &[64 << 30]).unwrap();
    for request in &desktop.volume.requests {
        let kind = match request.kind {
            Operation::Read => RecordedKind::Read,
            Operation::Write => RecordedKind::Write,
            Operation::WriteZeroes => RecordedKind::WriteZeroes,
            Operation::Discard => RecordedKind::Discard,
        };
        let Request { time_us, offset, bytes, content, .. } = *request;
        let entry = Entry { time_us, offset, bytes, volume: 0, kind, content };
        writer.add(Record::Request(entry)).unwrap();
    }
    writer.add(Record::End { time_us: 1 }).unwrap();
    writer.finish().unwrap();
    let phases: Vec<Phase> = desktop.phases.iter().map(|(_, phase)| phase.clone()).collect();
    std::fs::write(path.with_extension("phases"), phases_text(&phases)).unwrap();
    path
}

const SESSIONS: Sessions = Sessions { users: 1, logons_s: 0.0, loops: 2, copies_files: true };

#[test]
fn a_desktop_of_the_model_agrees_with_itself() {
    // Not in /tmp, because tmpfs may have no direct I/O.
    let dir = tempfile::tempdir_in(env!("CARGO_MANIFEST_DIR")).unwrap();
    let profile = small();
    let files: Vec<PathBuf> = (0..2)
        .map(|number| record(dir.path(), number, &desktop(&profile, 7 + number as u64, &SESSIONS, true)))
        .collect();
    let recorded = Recorded::load(&files, None).unwrap();
    let models = modelled(&profile, &recorded, 7);
    let stop = AtomicBool::new(false);
    let validation = run(&recorded, &models, dir.path(), &stop, &|_, _, _| ()).unwrap();
    // The requests are the same, and so is each figure.
    assert_eq!(validation.recorded, validation.modelled);
    let kinds: Vec<Kind> = validation.recorded[0].iter().map(|(kind, _)| *kind).collect();
    assert_eq!(kinds, [Kind::Boot, Kind::Logon, Kind::Loop]);
    // The requests wait for the cache, so a busy host changes little.
    assert!(!validation.sizes.is_empty());
    assert!(validation.sizes[0].recorded.iter().all(|size| size.spilled_bytes > 0), "{validation:?}");
    assert!(validation.sizes.iter().all(Size::agrees), "{:?}", validation.sizes);
    let report = Report {
        recorded: &recorded,
        source: "x".into(),
        profile: &profile,
        seed: 7,
        validation: &validation,
    };
    let text = report.text();
    assert!(
        text.contains("within 20 % in spilled bytes") && text.contains("Recorded desktops: 2. 5 or more"),
        "{text}"
    );
    assert!(report.html().contains("One loop of a session"));
}

#[test]
fn a_write_cache_that_fails_is_in_the_report() {
    let dir = tempfile::tempdir_in(env!("CARGO_MANIFEST_DIR")).unwrap();
    let profile = small();
    let file = record(dir.path(), 0, &desktop(&profile, 1, &SESSIONS, true));
    let recorded = Recorded::load(std::slice::from_ref(&file), None).unwrap();
    let models = modelled(&profile, &recorded, 1);
    let stop = AtomicBool::new(false);
    // The directory of the overflow is a file, so its free space can be read, but no overflow can be created.
    let validation = run(&recorded, &models, &file, &stop, &|_, _, _| ()).unwrap();
    let failure = validation.failure.clone().unwrap();
    assert!(failure.starts_with("the write cache failed with"), "{failure}");
    let report = Report {
        recorded: &recorded,
        source: "x".into(),
        profile: &profile,
        seed: 1,
        validation: &validation,
    };
    for shown in [report.text(), report.html()] {
        assert!(shown.contains("The study failed: the write cache failed with"), "{shown}");
        assert!(shown.contains("One loop of a session"), "{shown}");
    }
}

#[test]
fn caches_that_spill_nothing_are_reported() {
    let nothing = Overflowed { spilled_bytes: 0, operations: 0 };
    let something = Overflowed { spilled_bytes: 5, operations: 1 };
    let size = |recorded, modelled| Size { ram_bytes: 1, recorded: vec![recorded], modelled: vec![modelled] };
    let alike = size(nothing, nothing);
    assert!(alike.spills_nothing() && alike.agrees());
    let other = size(nothing, something);
    assert!(!other.spills_nothing() && !other.agrees());
}

#[test]
fn a_model_that_writes_more_reports_its_deviation() {
    let dir = tempfile::tempdir_in(env!("CARGO_MANIFEST_DIR")).unwrap();
    let profile = small();
    let file = record(dir.path(), 0, &desktop(&profile, 1, &SESSIONS, true));
    let recorded = Recorded::load(&[file], None).unwrap();
    let twice = small().with(&[("copy_files", 12.0)]);
    let models = modelled(&twice, &recorded, 1);
    let stop = AtomicBool::new(false);
    let validation = run(&recorded, &models, dir.path(), &stop, &|_, _, _| ()).unwrap();
    let report =
        Report { recorded: &recorded, source: "x".into(), profile: &twice, seed: 1, validation: &validation };
    let text = report.text();
    assert!(text.contains("the model is not within 20 % of the guests: the model has "), "{text}");
    assert!(text.contains("% more spilled bytes"), "{text}");
}

#[test]
fn figures_of_a_phase_are_as_expected() {
    let request = |time_s: u64, kind, block: u64, blocks: u64, content| Request {
        time_us: time_s * 1_000_000,
        offset: block * 4096,
        bytes: blocks * 4096,
        kind,
        content,
    };
    let (write, unknown) = (Operation::Write, Content::Unknown);
    let requests = vec![
        request(1, write, 0, 4, Content::Packs(3)),
        request(2, Operation::Read, 100, 1, unknown),
        request(3, Operation::Read, 3, 2, unknown),
        request(4, write, 3, 2, Content::Packs(16)),
        request(5, write, 8, 2, Content::Zero),
        // Between the phases, block 0 is discarded, so it counts as new when it is written again.
        request(10, Operation::Discard, 0, 1, unknown),
        request(12, write, 0, 2, unknown),
        request(13, Operation::WriteZeroes, 2, 1, unknown),
    ];
    let phase = |name: &str, from_s, to_s| Phase { name: name.into(), from_s, to_s };
    let desktop = Desktop {
        volume: Volume { name: "v".into(), requests },
        phases: vec![(Kind::Boot, phase("boot", 0.0, 9.0)), (Kind::Session, phase("session", 11.0, 14.0))],
    };
    let found = by_kind(&desktop);
    let boot = Figures {
        seconds: 9.0,
        writes: 3.0,
        written_bytes: 8.0 * 4096.0,
        discarded_bytes: 0.0,
        read_share: 0.25,
        rewritten_share: 1.0 / 8.0,
        packs_share: 0.5,
        free_share: 0.25,
        live_bytes: 5.0 * 4096.0,
        lengths: vec![16384, 8192, 8192],
    };
    assert_eq!(found[0], (Kind::Boot, boot));
    let session = &found[1].1;
    assert_eq!((session.writes, session.rewritten_share, session.live_bytes), (1.0, 0.5, 4.0 * 4096.0));
    assert_eq!(session.discarded_bytes, 4096.0);
}

#[test]
fn distances_of_distributions_are_as_expected() {
    assert_eq!(distance(&[1, 2, 3, 4], &[1, 2, 3, 4]), Some(0.0));
    assert_eq!(distance(&[1, 1, 1, 9], &[9, 9]), Some(0.75));
    assert_eq!(distance(&[1], &[]), None);
}

#[test]
fn deviations_are_those_of_the_medians() {
    assert_eq!(deviation(&[10.0, 20.0, 30.0], &[25.0]), Some(0.25));
    assert_eq!((deviation(&[0.0], &[0.0]), deviation(&[0.0], &[1.0])), (Some(0.0), None));
}

#[test]
fn recordings_without_known_phases_are_refused() {
    let dir = tempfile::tempdir().unwrap();
    let file = record(dir.path(), 0, &desktop(&small(), 1, &SESSIONS, true));
    let phases = file.with_extension("phases");
    let refused = |boot_s| format!("{:#}", Recorded::load(std::slice::from_ref(&file), boot_s).unwrap_err());
    std::fs::write(&phases, "boot\t0\tx\n").unwrap();
    assert!(refused(None).contains("desk-0.phases: line 1: \"x\" is not a time"), "{}", refused(None));
    std::fs::write(&phases, "nap\t0\t5\n").unwrap();
    assert!(
        refused(None).contains("has an unknown phase \"nap\": known phases are boot, logon"),
        "{}",
        refused(None)
    );
    std::fs::remove_file(&phases).unwrap();
    assert!(refused(None).contains("give the duration of the boot with --boot-seconds"), "{}", refused(None));
    assert!(refused(Some(1e6)).contains("so nothing follows a boot of 1000000 s"), "{}", refused(Some(1e6)));
    let recorded = Recorded::load(std::slice::from_ref(&file), Some(250.0)).unwrap();
    assert_eq!(recorded.desktops[0].kinds(), [Kind::Boot, Kind::Session]);
    // A session without segments copies no files.
    assert_eq!(modelled(&small(), &recorded, 1)[0].kinds(), [Kind::Boot, Kind::Session]);
    let csv = dir.path().join("msr.csv");
    std::fs::write(&csv, "128166372003061629,desk,0,Write,0,4096,100\n").unwrap();
    let other = format!("{:#}", Recorded::load(&[csv], Some(1.0)).unwrap_err());
    assert!(other.contains("is a trace of another program"), "{other}");
}
