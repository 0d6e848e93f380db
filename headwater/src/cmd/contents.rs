//! `headwater cache contents`: prints what occupies a machine's write cache, as tables. The daemon makes the report.

use std::collections::HashMap;

use headwater_api::{
    CacheContents, ContentsKind, HeldBytes, KindContents, MachineSort, PathContents, Problem, ProblemKind,
};
use headwater_attribution::scan::FIRST_VOLUME;
use headwater_block::size;

use crate::cli::By;
use crate::client::Client;
use crate::show;

/// The most files and the most directories of several machines together.
const ITEMS_MAX: usize = 1000;

/// Scans some machines of a catalog that are on, one after the other, and adds up what their write caches hold. Returns that, and whose it is.
pub async fn of_catalog(
    client: &Client,
    catalog: &str,
    most: usize,
) -> anyhow::Result<(CacheContents, String)> {
    // A catalog that is not there is an error of its own.
    client.catalog(catalog).await?;
    let filter = format!("catalog:{catalog} is:on");
    let machines = client.machines_like(&filter, MachineSort::Name, None).await?.machines;
    if machines.is_empty() {
        let message = format!("no machine of catalog '{catalog}' is on, so there is no write cache to scan");
        return Err(Problem::new(ProblemKind::Conflict, message)
            .advise("start a machine of the catalog")
            .into());
    }
    let step = machines.len().div_ceil(most).max(1);
    let (mut sum, mut count, mut last) = (CacheContents::default(), 0, None);
    for machine in machines.iter().step_by(step) {
        match client.cache_contents(&machine.name).await {
            Ok(found) => {
                add(&mut sum, found);
                count += 1;
            }
            // It may have been stopped or reset since the list was made.
            Err(error) => {
                tracing::warn!("machine '{}' is left out: {error:#}", machine.name);
                last = Some(error.context(format!("cannot scan machine '{}'", machine.name)));
            }
        }
    }
    if count == 0
        && let Some(error) = last
    {
        return Err(error);
    }
    let whose = format!("{count} of the {} machines of catalog {catalog} that are on", machines.len());
    sum.machine.clone_from(&whose);
    Ok((sum, whose))
}

fn plus(one: &mut HeldBytes, other: &HeldBytes) {
    one.total_bytes += other.total_bytes;
    one.ram_bytes += other.ram_bytes;
    one.packed_bytes += other.packed_bytes;
    one.disk_bytes += other.disk_bytes;
}

/// Adds what another machine's write cache holds. Paths are equal if they are in the partition of the same number: the machines boot the
/// same image. Hints and remarks are about single machines, and left out.
fn add(sum: &mut CacheContents, other: CacheContents) {
    sum.at_ms = sum.at_ms.max(other.at_ms);
    sum.took_ms += other.took_ms;
    sum.files_total += other.files_total;
    plus(&mut sum.held, &other.held);
    for KindContents { kind, held } in other.kinds {
        match sum.kinds.iter_mut().find(|known| known.kind == kind) {
            Some(known) => plus(&mut known.held, &held),
            None => sum.kinds.push(KindContents { kind, held }),
        }
    }
    sum.kinds.sort_by_key(|kind| std::cmp::Reverse(kind.held.total_bytes));
    for mut partition in other.partitions {
        match sum.partitions.iter_mut().find(|known| known.number == partition.number) {
            Some(known) => {
                plus(&mut known.held, &partition.held);
                known.free_bytes += partition.free_bytes;
            }
            None => {
                partition.remarks.clear();
                sum.partitions.push(partition);
            }
        }
    }
    sum.files = added(std::mem::take(&mut sum.files), other.files);
    sum.directories = added(std::mem::take(&mut sum.directories), other.directories);
}

fn added(known: Vec<PathContents>, more: Vec<PathContents>) -> Vec<PathContents> {
    let mut all: HashMap<(u32, String), PathContents> = HashMap::new();
    for item in known.into_iter().chain(more) {
        match all.get_mut(&(item.partition, item.path.clone())) {
            Some(known) => plus(&mut known.held, &item.held),
            None => {
                all.insert((item.partition, item.path.clone()), item);
            }
        }
    }
    let mut all: Vec<PathContents> = all.into_values().collect();
    all.sort_by(|a, b| b.held.total_bytes.cmp(&a.held.total_bytes).then_with(|| a.path.cmp(&b.path)));
    all.truncate(ITEMS_MAX);
    all
}

/// Writes the tables, and then the hints.
pub fn show(contents: &CacheContents, whose: &str, by: By, lines: usize) -> anyhow::Result<()> {
    let all = contents.held;
    if all.total_bytes == 0 {
        return show::line(&format!("the write cache of {whose} is empty"));
    }
    show::line(&format!(
        "{} in the write cache of {whose}: RAM {}, packed {}, disk {}",
        size::format(all.total_bytes),
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
                show::line(&format!("and {more} smaller files"))?;
            }
        }
        By::Kind => {
            let rows = contents.partitions.iter().map(|partition| {
                row(&partition.held, format!("{}: {}", place(partition.number), partition.file_system))
            });
            table("PARTITION", rows.collect())?;
        }
    }
    for partition in &contents.partitions {
        for remark in &partition.remarks {
            show::line(&format!(
                "{} ({}): {}",
                place(partition.number),
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

/// A partition or a logical volume, by its number.
fn place(number: u32) -> String {
    match number {
        0 => "the whole disk".to_owned(),
        number if number >= FIRST_VOLUME => format!("LVM volume {number}"),
        number => format!("partition {number}"),
    }
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

#[cfg(test)]
mod tests {
    use super::*;

    fn item(partition: u32, path: &str, bytes: u64) -> PathContents {
        let held = HeldBytes { total_bytes: bytes, ram_bytes: bytes, ..HeldBytes::default() };
        PathContents { partition, path: path.to_owned(), kind: ContentsKind::File, held }
    }

    #[test]
    fn machines_add_up_by_partition_and_path() {
        let of = |bytes: u64, other: &str| CacheContents {
            held: HeldBytes { total_bytes: bytes, ..HeldBytes::default() },
            kinds: vec![KindContents {
                kind: ContentsKind::File,
                held: HeldBytes { total_bytes: bytes, ..HeldBytes::default() },
            }],
            files: vec![item(1, "/var/log", bytes), item(2, "/var/log", 1), item(1, other, 5)],
            files_total: 3,
            ..CacheContents::default()
        };
        let mut sum = CacheContents::default();
        add(&mut sum, of(10, "/a"));
        add(&mut sum, of(30, "/b"));
        assert_eq!((sum.held.total_bytes, sum.kinds.len(), sum.files_total), (40, 1, 6));
        assert_eq!(
            sum.files,
            [item(1, "/var/log", 40), item(1, "/a", 5), item(1, "/b", 5), item(2, "/var/log", 2)]
        );
    }
}
