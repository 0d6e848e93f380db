//! Compares placement with a second implementation, in Python, for each size of the table and a grid of questions.

use std::process::Command;

use headwater_sizes::{
    Architecture, Date, Generation, ImageFacts, OsDiskPlace, Placement, Question, SizeTable, place, size::GIB,
};

/// Converts a row of the grid to a question.
fn question(words: &[&str]) -> Question {
    let [os, full, trusted, places, generation, temp_left, vcpus, memory, today] = words else {
        panic!("an odd question: {words:?}")
    };
    let gib = |text: &str| text.parse::<u64>().unwrap() * GIB;
    Question {
        image: ImageFacts {
            os_disk_bytes: gib(os),
            generation: Generation::parse(generation).ok(),
            architecture: Architecture::X64,
        },
        places: places.split(',').map(|word| OsDiskPlace::parse(word).unwrap()).collect(),
        full_copy: *full == "1",
        trusted_launch: *trusted == "1",
        temp_left_bytes: gib(temp_left),
        vcpus_min: vcpus.parse().unwrap(),
        memory_min_bytes: gib(memory),
        today: Date::parse(today).unwrap(),
    }
}

/// A placement in the notation of the Python program.
fn words(placement: &Placement) -> String {
    let whole = |bytes: u64| {
        assert!(bytes.is_multiple_of(GIB), "{placement:?}");
        (bytes / GIB).to_string()
    };
    let maybe = |value: Option<String>| value.unwrap_or_else(|| "-".to_owned());
    let Placement { place, taken_bytes, left, read, .. } = placement;
    [
        place.to_string(),
        whole(*taken_bytes),
        maybe(left.temp_bytes.map(whole)),
        left.nvme_disks.to_string(),
        whole(left.nvme_bytes),
        maybe(read.iops.map(|iops| iops.to_string())),
        maybe(read.bytes_per_second.map(|bytes| bytes.to_string())),
    ]
    .join(" ")
}

#[test]
fn placement_agrees_with_a_second_implementation_on_the_whole_table() {
    let here = env!("CARGO_MANIFEST_DIR");
    let mut python = Command::new("python3");
    python.arg(format!("{here}/tests/oracle.py")).arg(format!("{here}/src/azure-sizes.csv"));
    let output = python.output().expect("python3 is needed (apt-get install python3-minimal)");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let table = SizeTable::built_in();
    let (mut lines, mut placed) = (0, 0);
    for line in std::str::from_utf8(&output.stdout).unwrap().lines() {
        let (asked, expected) = line.split_once(" = ").expect("an answer");
        let mut asked: Vec<&str> = asked.split(' ').collect();
        let size = table.size(asked.pop().unwrap()).unwrap();
        let question = question(&asked);
        assert_eq!(question.check(), Ok(()), "{line}");
        let found = place(size, &question);
        assert_eq!(found.as_ref().map_or("-".to_owned(), words), expected, "{line}: {found:?}");
        lines += 1;
        placed += usize::from(found.is_ok());
    }
    // Each size occurred, and both outcomes are frequent.
    assert_eq!((table.sizes.len(), lines % 135), (135, 0));
    assert!(lines > 200_000 && placed > 50_000 && lines - placed > 50_000, "{placed} of {lines}");
}
