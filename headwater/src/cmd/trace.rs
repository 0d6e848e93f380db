//! `headwater image trace`: shows, records, merges, saves and removes boot traces. A boot trace lists which parts of
//! an image a boot reads first, so that they can be fetched early.

use std::time::Duration;

use anyhow::Context;
use headwater_api::{
    BootTrace, Machine, MachineState, MergeTraceRequest, Problem, ProblemKind, SaveTraceRequest, TracePlace,
};
use headwater_block::size;

use crate::cli::{MachineArgs, TraceCommand};
use crate::client::Client;
use crate::cmd::channels::behind_store;
use crate::cmd::image::{absolute_path, new_file};
use crate::cmd::machine;
use crate::show::{self, progress::said_if_slow};
use crate::signals::EndSignals;

/// How often the state of the machine is read.
const INTERVAL: Duration = Duration::from_millis(500);
/// How often the progress is printed.
const SAID_EVERY: Duration = Duration::from_secs(5);
/// Timeout of a boot, which can take minutes in emulation.
const BOOT_MAX: Duration = Duration::from_secs(600);

/// The requirements for recording boots, as advice.
const RECORDS: &str = "start the daemon without --boot-trace off; if it reads its store from servers, also with --chunk-cache DIR:SIZE";

/// Runs a command.
pub async fn run(client: &Client, command: TraceCommand, json: bool) -> anyhow::Result<u8> {
    let trace = match command {
        TraceCommand::Show { image } => {
            said_if_slow(json, &behind_store(&image), client.trace(&image)).await?
        }
        TraceCommand::Record { image, after, machine } => {
            return record(client, &image, Duration::from_secs(after), &machine, json).await;
        }
        TraceCommand::Merge { image, files } => {
            let mut merged = None;
            for file in files {
                client.sees(&file)?;
                let request = MergeTraceRequest { source: absolute_path(&file)? };
                let merging = client.merge_trace(&image, &request);
                merged = Some(said_if_slow(json, &behind_store(&image), merging).await?);
            }
            merged.context("there is no file to merge")?
        }
        TraceCommand::Save { image, file } => {
            client.sees(&file)?;
            let request = SaveTraceRequest { target: new_file(&file)? };
            said_if_slow(json, &behind_store(&image), client.save_trace(&image, &request)).await?
        }
        TraceCommand::Remove { image } => {
            let gone = said_if_slow(json, &behind_store(&image), client.remove_trace(&image)).await?;
            if json {
                show::json(&gone)?;
            } else {
                let BootTrace { version, boots, .. } = gone;
                let name = format!("{}@{}", version.image, version.number);
                show::line(&format!(
                    "the boot trace of {name}, of {}, is removed; its next boots are recorded",
                    times(boots)
                ))?;
            }
            return Ok(0);
        }
    };
    show(&trace, json)
}

fn show(trace: &BootTrace, json: bool) -> anyhow::Result<u8> {
    if json {
        show::json(trace)?;
    } else {
        show::line(&sentence(trace))?;
    }
    Ok(0)
}

fn sentence(trace: &BootTrace) -> String {
    let BootTrace { version, boots, boots_wanted, chunks, image_bytes, stored_bytes, lasts_ms, place } =
        trace;
    let place = match place {
        TracePlace::Store => "in the store",
        TracePlace::Host => "on this host",
    };
    let more = match boots_wanted.saturating_sub(*boots) {
        0 => "no more are recorded".to_owned(),
        more => format!("{more} more will be recorded"),
    };
    format!(
        "{}@{}: {} in the first {} s, {chunks} chunks, {} of the disk, {} as stored; kept {place}, {more}",
        version.image,
        version.number,
        times(*boots),
        show::seconds(*lasts_ms),
        size::format(*image_bytes),
        size::format(*stored_bytes)
    )
}

fn times(boots: u32) -> String {
    if boots == 1 { "1 boot".to_owned() } else { format!("{boots} boots") }
}

/// Boots the version once. The machine is removed at the end, even after Ctrl-C.
async fn record(
    client: &Client,
    image: &str,
    after: Duration,
    args: &MachineArgs,
    json: bool,
) -> anyhow::Result<u8> {
    // Check first, because a boot takes minutes.
    if let Some(why) = client.status().await?.boots_unrecorded {
        let problem = Problem::new(ProblemKind::Invalid, format!("cannot record a boot of '{image}': {why}"));
        return Err(problem.advise(RECORDS).into());
    }
    let what = behind_store(image);
    let known = said_if_slow(json, &what, known_boots(client, image)).await?;
    if let Some(trace) = known.as_ref().filter(|trace| trace.boots >= trace.boots_wanted) {
        let name = format!("{}@{}", trace.version.image, trace.version.number);
        let text = format!(
            "cannot record a boot of {name}: its trace already has {}, and no more are recorded",
            times(trace.boots)
        );
        let problem = Problem::new(ProblemKind::Conflict, text);
        return Err(problem
            .advise(format!(
                "'headwater image trace remove {name}' removes it, so that boots are recorded again"
            ))
            .into());
    }
    let mut signals = EndSignals::catch()?;
    let name = free_name(client).await?;
    let request = machine::creation(name.clone(), machine::Boots::Image(image.to_owned()), args)?;
    said_if_slow(json, &what, client.create_machine(&request)).await?;
    let booted = tokio::select! {
        booted = boot(client, &name, after, json) => booted,
        signal = signals.next() => Err(Problem::new(ProblemKind::Cancelled, format!("stopped by {signal}")).into()),
    };
    // The recording is written when the machine is removed.
    let removed = async {
        client.change_machine(&name, "stop?force=true").await?;
        client.remove_machine(&name, true).await
    };
    let removed = removed.await.with_context(|| format!("cannot remove the machine {name}"));
    booted.with_context(|| format!("no boot of '{image}' was recorded"))?;
    removed?;
    let trace = said_if_slow(json, &what, known_boots(client, image)).await?;
    let before = known.map_or(0, |trace| trace.boots);
    match trace.filter(|trace| trace.boots > before) {
        Some(trace) => show(&trace, json),
        None => {
            let text = format!("the boot of '{image}' was not recorded: see the daemon's log for the reason");
            Err(Problem::new(ProblemKind::Failed, text).into())
        }
    }
}

async fn known_boots(client: &Client, image: &str) -> anyhow::Result<Option<BootTrace>> {
    // If the image does not exist, creating the machine reports that.
    match client.trace(image).await {
        Ok(trace) => Ok(Some(trace)),
        Err(e) => match e.downcast::<Problem>() {
            Ok(problem) if problem.kind == ProblemKind::NotFound => Ok(None),
            Ok(problem) => Err(problem.into()),
            Err(e) => Err(e),
        },
    }
}

async fn free_name(client: &Client) -> anyhow::Result<String> {
    let machines = client.machines().await?.machines.into_iter().map(|machine| machine.name);
    let catalogs = client.catalogs().await?.catalogs.into_iter().map(|catalog| catalog.name);
    let taken: Vec<String> = machines.chain(catalogs).collect();
    let is_free = |name: &String| !taken.contains(name);
    (1u32..).map(|number| format!("trace-{number}")).find(is_free).context("there is no name left")
}

async fn boot(client: &Client, name: &str, after: Duration, json: bool) -> anyhow::Result<()> {
    let begun = tokio::time::Instant::now();
    // Since when the guest has not been up; it may reboot.
    let (mut said, mut down_since) = (begun, begun);
    let mut machine = client.change_machine(name, "start").await?;
    let mut up_since = None;
    loop {
        match machine.state {
            MachineState::Running
                if up_since.get_or_insert_with(tokio::time::Instant::now).elapsed() >= after =>
            {
                return Ok(());
            }
            _ if machine::is_off(&machine) => {
                anyhow::bail!(Problem::new(ProblemKind::Failed, machine::sentence(&machine)));
            }
            MachineState::Running => down_since = tokio::time::Instant::now(),
            _ if down_since.elapsed() >= BOOT_MAX => {
                anyhow::bail!("the guest has not booted within {} s", BOOT_MAX.as_secs());
            }
            _ => up_since = None,
        }
        if !json && said.elapsed() >= SAID_EVERY {
            said = tokio::time::Instant::now();
            show::aside(&format!("{}\n", progress(&machine, begun.elapsed())));
        }
        tokio::time::sleep(INTERVAL).await;
        machine = client.machine(name).await?;
    }
}

fn progress(machine: &Machine, passed: Duration) -> String {
    let read = machine.disk.as_ref().map_or(0, |disk| disk.image_read_bytes);
    let state = if machine.state == MachineState::Running { "is up" } else { "boots" };
    format!("{} {state}: {} read from the image in {} s", machine.name, size::format(read), passed.as_secs())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_trace_is_told_in_a_sentence() {
        let version = headwater_api::ImageVersion {
            image: "debian".into(),
            number: 3,
            hash: String::new(),
            size_bytes: 0,
            stored_bytes: 0,
            created_at_ms: 0,
            source: String::new(),
            note: String::new(),
            author: String::new(),
            retired: false,
            keeps_identity: false,
            channels: Vec::new(),
        };
        let trace = BootTrace {
            version,
            boots: 1,
            boots_wanted: 4,
            chunks: 800,
            image_bytes: 50 << 20,
            stored_bytes: 17 << 20,
            lasts_ms: 14_250,
            place: TracePlace::Store,
        };
        let text = sentence(&trace);
        assert!(text.starts_with("debian@3: 1 boot in the first 14.2"), "{text}");
        assert!(text.ends_with("17.0 MiB as stored; kept in the store, 3 more will be recorded"), "{text}");
        assert!(sentence(&BootTrace { boots: 4, ..trace }).ends_with("no more are recorded"));
    }
}
