//! `headwater cache contents`: prints what occupies a machine's write cache, as tables.

use headwater_api::{CacheContents, ContentsKind, HeldBytes, PathContents};
use headwater_block::size;

use crate::cli::By;
use crate::show;

/// Writes the tables, and then the hints.
pub fn show(contents: &CacheContents, by: By, lines: usize) -> anyhow::Result<()> {
    let all = contents.held;
    if all.total_bytes == 0 {
        return show::line(&format!("the write cache of machine {} is empty", contents.machine));
    }
    show::line(&format!(
        "{} in the write cache of machine {}: RAM {}, packed {}, disk {}",
        size::format(all.total_bytes),
        contents.machine,
        size::format(all.ram_bytes),
        size::format(all.packed_bytes),
        size::format(all.disk_bytes)
    ))?;
    show::line("")?;
    let row = |held: &HeldBytes, what: String| {
        let percent = held.total_bytes.saturating_mul(100) / all.total_bytes.max(1);
        let mut row = vec![size::format(held.total_bytes), format!("{percent} %")];
        row.extend([held.ram_bytes, held.packed_bytes, held.disk_bytes].map(size::format));
        row.push(what);
        row
    };
    let table = |last: &str, rows: Vec<Vec<String>>| {
        show::table(&["SIZE", "SHARE", "RAM", "PACKED", "DISK", last], rows)
    };
    let kinds = contents.kinds.iter().map(|kind| row(&kind.held, in_words(kind.kind).to_owned()));
    table("KIND", kinds.collect())?;
    show::line("")?;
    match by {
        By::Dir => {
            let mut largest: Vec<&PathContents> = contents.directories.iter().take(lines).collect();
            largest
                .sort_by(|a, b| (a.partition, tree_order(&a.path)).cmp(&(b.partition, tree_order(&b.path))));
            let several = contents.partitions.len() > 1;
            let rows = largest.into_iter().map(|directory| row(&directory.held, shown(directory, several)));
            table("DIRECTORY", rows.collect())?;
        }
        By::File => {
            let several = contents.partitions.len() > 1;
            let files = contents.files.iter().take(lines);
            table("FILE", files.map(|file| row(&file.held, shown(file, several))).collect())?;
            let more = contents.files_total.saturating_sub(u64::try_from(lines.min(contents.files.len()))?);
            if more > 0 {
                show::line(&format!("and {more} smaller ones"))?;
            }
        }
        By::Kind => {
            let name = |number| {
                if number == 0 { "the whole disk".to_owned() } else { format!("partition {number}") }
            };
            let rows = contents.partitions.iter().map(|partition| {
                row(&partition.held, format!("{}: {}", name(partition.number), partition.file_system))
            });
            table("PARTITION", rows.collect())?;
        }
    }
    for partition in &contents.partitions {
        for remark in &partition.remarks {
            let number = partition.number;
            show::line(&format!(
                "partition {number} ({}): {}",
                show::printable(&partition.file_system),
                show::printable(remark)
            ))?;
        }
    }
    if !contents.hints.is_empty() {
        show::line("")?;
    }
    for hint in &contents.hints {
        show::line(&format!("hint: {}", show::printable(&hint.message)))?;
        if let Some(command) = &hint.command {
            show::line(&format!("    {}", show::printable(command)))?;
        }
    }
    Ok(())
}

/// A sort key: a parent comes before its contents.
fn tree_order(path: &str) -> Vec<&str> {
    path.split('/').filter(|part| !part.is_empty()).collect()
}

/// A path, with its partition if there are several.
fn shown(item: &PathContents, several: bool) -> String {
    let swap = if item.kind == ContentsKind::Swap { " (swap)" } else { "" };
    if several { format!("{}:{}{swap}", item.partition, item.path) } else { format!("{}{swap}", item.path) }
}

fn in_words(kind: ContentsKind) -> &'static str {
    match kind {
        ContentsKind::File => "files and directories",
        ContentsKind::Free => "free: deleted and not trimmed, or not yet committed",
        ContentsKind::Journal => "journal of the file system",
        ContentsKind::Swap => "swap and page files",
        ContentsKind::Metadata => "metadata of the file system",
        ContentsKind::Unknown => "unknown: not readable here",
        ContentsKind::Outside => "outside of all partitions",
        ContentsKind::Other => "of a kind that a newer daemon added",
    }
}
