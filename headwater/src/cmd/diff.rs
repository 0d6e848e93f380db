//! `headwater image diff`: prints the differences between two versions that the daemon found.

use headwater_api::{DiffReport, FileChange, PartitionDifference, TaskResult};
use headwater_block::size;

use crate::client::Client;
use crate::show::{self, progress::Shown};

/// Compares two versions and prints what changed.
pub async fn run(client: &Client, from: &str, to: &str, json: bool) -> anyhow::Result<()> {
    let mut shown = Shown::begin(&format!("diff {from} {to}"), json);
    let result = client.diff(from, to, |progress| shown.update(progress)).await;
    shown.end();
    let TaskResult::Compared(report) = result? else {
        anyhow::bail!(
            "the daemon did not answer with a comparison: it may be of another version than this program"
        );
    };
    if json { show::json(&report) } else { show_report(&report) }
}

fn show_report(report: &DiffReport) -> anyhow::Result<()> {
    let DiffReport { from, to, changed_chunks, changed_bytes, partitions } = report;
    let places = format!("{}@{} and {}@{}", from.image, from.number, to.image, to.number);
    if *changed_chunks == 0 && from.size_bytes == to.size_bytes {
        return show::line(&format!("{places} are the same"));
    }
    if from.size_bytes != to.size_bytes {
        let (old, new) = distinguishable(from.size_bytes, to.size_bytes);
        show::line(&format!("the size was {old} and is {new}"))?;
    }
    let bytes = size::format(*changed_bytes);
    show::line(&format!("{places} differ in {bytes}, in {changed_chunks} chunks"))?;
    partitions.iter().filter(|partition| partition.changed_bytes > 0).try_for_each(show_partition)
}

/// Two sizes; in bytes if they would look the same.
fn distinguishable(old_bytes: u64, new_bytes: u64) -> (String, String) {
    let (old, new) = (size::format(old_bytes), size::format(new_bytes));
    if old == new { (format!("{old_bytes} bytes"), format!("{new_bytes} bytes")) } else { (old, new) }
}

fn show_partition(partition: &PartitionDifference) -> anyhow::Result<()> {
    let name = match partition.number {
        0 => "the whole disk".to_owned(),
        number => format!("partition {number}"),
    };
    let files = partition.files.as_ref().map(|files| format!(", {} files", files.len())).unwrap_or_default();
    show::line(&format!("{name}: {} changed{files}", size::format(partition.changed_bytes)))?;
    for file in partition.files.iter().flatten() {
        let sign = match file.change {
            FileChange::Added => '+',
            FileChange::Removed => '-',
            FileChange::Changed => 'M',
            FileChange::Attributes => 'a',
        };
        show::line(&format!("  {sign} {} ({})", show::printable(&file.path), size::format(file.size_bytes)))?;
    }
    partition.remark.iter().try_for_each(|remark| show::line(&format!("  {}", show::printable(remark))))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_that_differ_by_little_are_told_apart() {
        assert_eq!(distinguishable(1 << 30, 2 << 30), ("1.0 GiB".to_owned(), "2.0 GiB".to_owned()));
        let exact = ("1073741824 bytes".to_owned(), "1073742336 bytes".to_owned());
        assert_eq!(distinguishable(1 << 30, (1 << 30) + 512), exact);
    }
}
