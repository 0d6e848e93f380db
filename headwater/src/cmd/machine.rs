//! Carries out the commands of `headwater machine` with requests to the daemon.

use std::io::{ErrorKind, Read};
use std::path::Path;
use std::time::Duration;

use anyhow::Context;
use flate2::read::MultiGzDecoder;
use headwater_api::platform::{Firmware, Network};
use headwater_api::{
    BootFrom, CacheMode, CacheSettings, Catalog, CreateMachine, DiskCounters, ExecRequest, Machine,
    MachineList, MachineSort, MachineState, Problem, ProblemKind, SetMachine, Wanted,
};
use headwater_block::{size, small_file};
use headwater_qemu::seed::MAX_USER_DATA_BYTES;

use crate::caches::NewLimits;
use crate::cli::{MachineArgs, MachineCommand, Which};
use crate::client::{Client, Owner};
use crate::cmd::{channels, console, cp, exec, personality, seal, trim};
use crate::failure::invalid;
use crate::replace::replace;
use crate::show::{self, progress::said_if_slow};

/// The pause between two requests for a machine's state, while a command waits for its boot.
const WAIT_INTERVAL: Duration = Duration::from_millis(500);

/// The first bytes of a gzip file (RFC 1952).
const GZIP_MAGIC: [u8; 2] = [0x1f, 0x8b];

/// The error if a request to the daemon ended, and its result was lost.
pub const NO_RESULT: &str =
    "internal error: the result of a request was lost: see 'headwater machine list', and report this error";

/// Appended to the result of a reset of a machine that is off.
const STAYS_OFF: &str = ", as it was: a reset does not start it, and its disk is pristine at its next start";

/// Carries out one command of `headwater machine`.
pub async fn run(client: Client, command: MachineCommand, json: bool) -> anyhow::Result<u8> {
    match command {
        MachineCommand::Create { name, image, catalog, host, persistent, host_name, boot, mac, machine } => {
            let boots = match (image, catalog) {
                (Some(image), _) if boot == Some(BootFrom::Network) => Boots::Target(image),
                (Some(image), _) => Boots::Image(image),
                (None, catalog) => {
                    let Catalog { name, cache, .. } = client.catalog(&catalog.unwrap_or_default()).await?;
                    Boots::Catalog { name, cache }
                }
            };
            let mut request =
                CreateMachine { host, host_name, boot, mac, ..creation(name, boots, &machine)? };
            if persistent {
                request.cache.get_or_insert_default().persistent = true;
            }
            let of = request.image.clone().unwrap_or_else(|| format!("the image of {}", request.name));
            let creating = client.create_machine(&request);
            let machine = said_if_slow(json, &channels::behind_store(&of), creating).await?;
            if json {
                show::json(&machine)?;
            } else {
                warn(machine.warning.as_deref());
                show::line(&format!("created {}, {}", machine.name, machine.uuid))?;
            }
        }
        MachineCommand::List { filter, sort, limit } => {
            let list = client.machines_like(&terms(&filter), sort, limit).await?;
            if json { show::json(&list)? } else { show_list(&list)? }
        }
        MachineCommand::Show { name } => show_one(&client, &name, json).await?,
        MachineCommand::Seal { name, note, over_newer, keep_identity } => {
            seal::machine(&client, &name, seal::request(note, over_newer, keep_identity), json).await?;
        }
        MachineCommand::Cp { from, to } => cp::run(&client, &from, &to, json).await?,
        MachineCommand::Rotate { which } => rotate(&client, named(&client, which).await?, json).await?,
        MachineCommand::Trim { which } => trim::run(&client, named(&client, which).await?, json).await?,
        MachineCommand::Set { name, limits: NewLimits { ram, disk }, weight, memory, cpus, personality } => {
            let limits = SetMachine { ram_bytes: ram, disk_bytes: disk, weight, memory_bytes: memory, cpus };
            let is_all = limits == SetMachine::default();
            personality::set(&client, Owner::Machine(&name), personality, is_all, json).await?;
            if !is_all {
                set(&client, &name, limits, json).await?;
            }
        }
        MachineCommand::Start { which, record, wait } => {
            let verb = if record { START_RECORDED } else { "start" };
            change(&client, &named(&client, which).await?, verb, wait, json).await?;
        }
        MachineCommand::Reset { which, wait } => {
            change(&client, &named(&client, which).await?, "reset", wait, json).await?;
        }
        MachineCommand::Stop { which, force } => {
            let verb = if force { "stop?force=true" } else { "stop" };
            change(&client, &named(&client, which).await?, verb, None, json).await?;
        }
        MachineCommand::Remove { which, force } => {
            remove(&client, named(&client, which).await?, force, json).await?;
        }
        MachineCommand::Console { name, log, follow } => console::run(&client, &name, log, follow).await?,
        MachineCommand::Screenshot { name, file } => screenshot(&client, &name, &file, json).await?,
        MachineCommand::Exec { name, timeout, stdin, command } => {
            let stdin_base64 = stdin.then(exec::standard_input).transpose()?;
            let timeout_ms = timeout.saturating_mul(1000);
            let request = ExecRequest { argv: command, timeout_ms, stdin_base64 };
            return exec::run(&client, &name, &request, json).await;
        }
    }
    Ok(0)
}

/// The names of the machines that the arguments of a command select.
async fn named(client: &Client, which: Which) -> anyhow::Result<Vec<String>> {
    if which.catalog.is_none() && which.filter.is_none() {
        return Ok(which.names);
    }
    let mut filter = which.filter.unwrap_or_default();
    if filter.trim().is_empty() && which.catalog.is_none() {
        return Err(invalid("the filter is empty, and would match all machines: write 'name:*' for all"));
    }
    if let Some(catalog) = &which.catalog {
        // A mistyped catalog would select no machine without an error.
        client.catalog(catalog).await?;
        filter.push_str(&format!(" catalog:{catalog}"));
    }
    let list = client.machines_like(&filter, MachineSort::Name, None).await?;
    if let Some(expected) = which.expect.filter(|expected| *expected != list.matching) {
        let message =
            format!("{} machines match, and {expected} were expected: nothing was done", list.matching);
        let problem = Problem::new(ProblemKind::Conflict, message);
        let terms = filter.trim();
        let advice = format!(
            "'headwater machine list' shows the machines of a filter; it was: {terms} (there, write ! instead of - before a term)"
        );
        return Err(problem.advise(advice).into());
    }
    Ok(list.machines.into_iter().map(|machine| machine.name).collect())
}

/// The filter text of these arguments. An argument may begin with `!` instead of `-`, which shells and clap take for
/// an option.
pub fn terms(arguments: &[String]) -> String {
    let term = |argument: &String| match argument.strip_prefix('!') {
        Some(rest) => format!("-{rest}"),
        None => argument.clone(),
    };
    arguments.iter().map(term).collect::<Vec<_>>().join(" ")
}

fn show_list(list: &MachineList) -> anyhow::Result<()> {
    show::line(&show::machines::machines(&list.machines))?;
    let shown = list.machines.len() as u64;
    if shown < list.matching {
        show::aside(&format!("{shown} of {} that match\n", list.matching));
    }
    Ok(())
}

/// Prints a warning: the change was made, but has no effect at present. The JSON of the answer has the warning too.
pub fn warn(warning: Option<&str>) {
    if let Some(warning) = warning {
        show::aside(&format!("headwater: {}\n", show::printable(warning)));
    }
}

/// What a new machine boots from.
pub enum Boots {
    /// A disk over this image.
    Image(String),
    /// A disk over this image, which firmware on the network reaches (`--boot network`).
    Target(String),
    /// The image of this catalog. The machine gets the catalog's write cache unless the command line gives another
    /// one.
    Catalog { name: String, cache: CacheSettings },
}

/// The request that creates a machine as the command line describes it.
pub fn creation(name: String, boots: Boots, args: &MachineArgs) -> anyhow::Result<CreateMachine> {
    let (image, catalog, cache) = match boots {
        Boots::Image(image) => (Some(image), None, CacheSettings::default()),
        Boots::Target(image) => (Some(image), None, CacheSettings::of_target()),
        Boots::Catalog { name: catalog, cache } => (None, Some(catalog), cache),
    };
    Ok(CreateMachine {
        host: None,
        name,
        image,
        catalog,
        cache: Some(args.cache_settings(cache)?),
        transport: args.transport,
        memory_bytes: args.memory,
        cpus: args.cpus,
        firmware: args.firmware,
        secure_boot: args.secure_boot,
        tpm: args.tpm,
        display: args.display,
        network: args.network.clone(),
        scratch_bytes: args.scratch,
        host_name: None,
        boot: None,
        mac: None,
        address: None,
        user_data: user_data(args)?,
    })
}

async fn set(client: &Client, name: &str, limits: SetMachine, json: bool) -> anyhow::Result<()> {
    let machine = said_if_slow(json, &behind(name), client.set_machine(name, &limits)).await?;
    if json {
        return show::json(&machine);
    }
    warn(machine.warning.as_deref());
    if limits.ram_bytes.or(limits.disk_bytes).is_some() || limits.weight.is_some() {
        show::line(&format!("{name} has a write cache of {}", cache_text(&machine.cache)))?;
    }
    if limits.memory_bytes.is_some() || limits.cpus.is_some() {
        let (memory, cpus) = (size::format(machine.memory_bytes), machine.cpus);
        show::line(&format!("{name} has memory of {memory}, {cpus} processors"))?;
    }
    Ok(())
}

/// The contents of the file that `--user-data` names, unpacked.
pub fn user_data(args: &MachineArgs) -> anyhow::Result<Option<String>> {
    args.user_data.as_deref().map(read_user_data).transpose()
}

fn read_user_data(path: &Path) -> anyhow::Result<String> {
    let failed = || format!("cannot read the user data {}", path.display());
    let bytes = match small_file::read(path, MAX_USER_DATA_BYTES as u64) {
        Err(e) if e.kind() == ErrorKind::InvalidData => return Err(invalid(format!("{}: {e}", failed()))),
        read => read.with_context(failed)?,
    };
    let bytes = if bytes.starts_with(&GZIP_MAGIC) { unpacked(&bytes, path)? } else { bytes };
    String::from_utf8(bytes).map_err(|_| {
        invalid(format!(
            "the user data {} is neither text in UTF-8 nor such text packed with gzip",
            path.display()
        ))
    })
}

/// Unpacks gzip, because the API takes text. cloud-init gets the same contents as from the packed file.
fn unpacked(bytes: &[u8], path: &Path) -> anyhow::Result<Vec<u8>> {
    let mut text = Vec::new();
    let most = MAX_USER_DATA_BYTES as u64;
    MultiGzDecoder::new(bytes).take(most + 1).read_to_end(&mut text).map_err(|e| {
        invalid(format!("the user data {} cannot be unpacked with gzip: {e}", path.display()))
    })?;
    if text.len() > MAX_USER_DATA_BYTES {
        let most = size::format(most);
        return Err(invalid(format!(
            "the user data {} is longer than {most} after it is unpacked",
            path.display()
        )));
    }
    Ok(text)
}

/// Saves a picture of a machine's screen.
async fn screenshot(client: &Client, name: &str, file: &Path, json: bool) -> anyhow::Result<()> {
    let png = client.screenshot(name).await?;
    if file == Path::new("-") {
        return show::bytes(&png);
    }
    replace(file, &png, 0o666).with_context(|| format!("cannot write {}", file.display()))?;
    if json {
        show::json(&serde_json::json!({ "screenshot": file }))
    } else {
        show::line(&format!("wrote {}", file.display()))
    }
}

/// The network of a machine or catalog, for people.
pub fn network_text(network: &Network) -> String {
    match network {
        Network::User => "user (out through the host)".to_owned(),
        Network::Bridge(name) => format!("a port of bridge {name}"),
    }
}

/// The fixed IP address of a machine, or how its guest gets one, for people.
fn address_text(machine: &Machine) -> String {
    match (&machine.network, &machine.identity.address) {
        (Network::Bridge(_), Some(address)) => address.to_string(),
        _ => "from a DHCP server".to_owned(),
    }
}

/// The display of a machine, for people.
fn display_text(machine: &Machine) -> String {
    match &machine.display_socket {
        Some(socket) => format!("{}, unix socket {}", machine.display, show::printable(socket)),
        None => machine.display.to_string(),
    }
}

/// The path segment that starts a machine and records its requests.
pub const START_RECORDED: &str = "start?record=true";

/// Changes all machines at the same time. Fails with the first failure after all requests have ended.
async fn change(
    client: &Client,
    names: &[String],
    verb: &'static str,
    wait: Option<u64>,
    json: bool,
) -> anyhow::Result<()> {
    let tasks: Vec<_> = names
        .iter()
        .map(|name| {
            let (client, name) = (client.clone(), name.clone());
            tokio::spawn(async move {
                let what = waits_for(&name, verb);
                let machine = said_if_slow(json, &what, client.change_machine(&name, verb)).await?;
                match wait {
                    // The machine was off and stays off, so there is no boot to wait for.
                    Some(_) if verb == "reset" && is_off(&machine) => Ok(machine),
                    Some(seconds) => {
                        let what =
                            format!("waiting until the guest of {name} has booted, {seconds} s at most");
                        let up = wait_until_up(&client, machine, Duration::from_secs(seconds));
                        said_if_slow(json, &what, up).await
                    }
                    None => Ok(machine),
                }
            })
        })
        .collect();
    let mut changed = Vec::new();
    let mut failures = Failures::new(json);
    for task in tasks {
        match task.await.context(NO_RESULT)? {
            Ok(machine) => changed.push(machine),
            Err(e) => failures.add(e),
        }
    }
    if json {
        show::if_read(show::json(&changed))?;
    } else {
        for machine in &changed {
            let remark = if verb == "reset" && is_off(machine) { STAYS_OFF } else { "" };
            show::if_read(show::line(&format!("{}{remark}", sentence(machine))))?;
        }
    }
    failures.end()
}

/// Gives machines new SSH host keys, one machine after the other. Fails with the first failure after all machines
/// were tried.
async fn rotate(client: &Client, names: Vec<String>, json: bool) -> anyhow::Result<()> {
    let mut rotated = Vec::new();
    let mut failures = Failures::new(json);
    for name in names {
        match said_if_slow(json, &behind(&name), client.change_machine(&name, "rotate")).await {
            Ok(machine) if json => rotated.push(machine),
            // In the format of known_hosts.
            Ok(machine) => {
                let key = &machine.identity.ssh_host_key_public;
                show::if_read(show::line(&format!("{name} {}", show::printable(key))))?;
            }
            Err(e) => failures.add(e),
        }
    }
    if json {
        show::if_read(show::json(&rotated))?;
    }
    failures.end()
}

/// Removes machines, one after the other. Fails with the first failure after all machines were tried.
async fn remove(client: &Client, names: Vec<String>, force: bool, json: bool) -> anyhow::Result<()> {
    let mut removed = Vec::new();
    let mut failures = Failures::new(json);
    for name in names {
        let what = if force { waits_for(&name, "remove") } else { behind(&name) };
        match said_if_slow(json, &what, client.remove_machine(&name, force)).await {
            Ok(()) if json => removed.push(name),
            Ok(()) => show::if_read(show::line(&format!("removed {name}")))?,
            Err(e) => failures.add(e),
        }
    }
    if json {
        show::if_read(show::removed(&removed))?;
    }
    failures.end()
}

/// The text that is shown while the daemon makes a change. It guesses what the change waits for.
fn waits_for(name: &str, verb: &str) -> String {
    match verb {
        "stop" => format!(
            "waiting for {name} to shut down; 'headwater machine stop --force {name}' ends it at once"
        ),
        "start" | START_RECORDED => format!("waiting for {name} to start, or for another change of it"),
        "reset" => format!("waiting for {name} to end and start again, or for another change of it"),
        _ => format!("waiting for {name} to end"),
    }
}

/// The text for a change that is immediate unless another change of the machine is in progress.
pub fn behind(name: &str) -> String {
    format!(
        "waiting for {name}: another change of this machine may be in progress, such as a stop that waits for its guest"
    )
}

/// Collects the failures of a command on several machines.
pub struct Failures {
    first: Option<anyhow::Error>,
    json: bool,
}

impl Failures {
    /// `json`: whether failures are printed as JSON.
    pub fn new(json: bool) -> Self {
        Self { first: None, json }
    }

    /// Prints each failure except the first one, which [`Failures::end`] returns: its exit code is that of the
    /// command.
    pub fn add(&mut self, error: anyhow::Error) {
        match self.first {
            Some(_) => crate::failure::tell(&error, self.json),
            None => self.first = Some(error),
        }
    }

    /// Fails with the first failure, if any.
    pub fn end(self) -> anyhow::Result<()> {
        self.first.map_or(Ok(()), Err)
    }
}

/// The state of a machine in one sentence.
pub fn sentence(machine: &Machine) -> String {
    let mut text = format!("{} is {}", machine.name, machine.state);
    if let (MachineState::Running, Some(boot_ms)) = (machine.state, machine.boot_ms) {
        text.push_str(&format!(", booted in {} s", show::seconds(boot_ms)));
    }
    if let Some(reason) = &machine.reason {
        text.push_str(&format!(": {}", show::printable(reason)));
    }
    if let Some(alarm) = &machine.alarm {
        text.push_str(&format!("; ALARM: {}", show::printable(&alarm.to_string())));
    }
    text
}

/// The mode and limits of a write cache, for people.
pub fn cache_text(cache: &CacheSettings) -> String {
    let ram = size::format(show::machines::ram_limit_bytes(cache));
    let disk = match cache.mode {
        CacheMode::Ram => String::new(),
        CacheMode::RamDisk | CacheMode::Disk => format!(", disk {}", size::format(cache.disk_bytes)),
    };
    let kept = if cache.persistent { ", persistent" } else { "" };
    let usual = cache.weight == CacheSettings::default_weight();
    let weight = if usual { String::new() } else { format!(", weight {}", cache.weight) };
    format!("{}, RAM {ram}{disk}{weight}{kept}", cache.mode)
}

/// How much of its image a machine's disk has copied to this host.
fn copied_text(disk: &DiskCounters) -> String {
    let whole = size::format(disk.to_copy_bytes);
    if disk.copied_bytes >= disk.to_copy_bytes {
        return format!("all {whole}; no server is needed");
    }
    let percent = u128::from(disk.copied_bytes) * 100 / u128::from(disk.to_copy_bytes);
    format!("{} of {whole} ({percent} %)", size::format(disk.copied_bytes))
}

/// What starts a machine, for people.
fn started_by(machine: &Machine) -> String {
    match machine.boot {
        BootFrom::Vm => "the daemon".to_owned(),
        BootFrom::Network => "its power button; it boots from the network".to_owned(),
    }
}

fn console_advice(name: &str) -> String {
    format!("'headwater machine console --log {name}' shows what it printed")
}

/// Whether a machine is off and will not start by itself. A guest that reboots is off for a moment.
pub fn is_off(machine: &Machine) -> bool {
    let restarts = machine.state == MachineState::Stopped && machine.wanted == Wanted::Running;
    !machine.state.is_active() && !restarts
}

/// The firmware, and whether Secure Boot is enabled.
pub fn firmware_text(firmware: Firmware, secure_boot: bool) -> String {
    if secure_boot { format!("{firmware} with Secure Boot") } else { firmware.to_string() }
}

/// The size of a scratch disk, for people.
pub fn scratch_text(scratch_bytes: u64) -> String {
    if scratch_bytes == 0 { "none".to_owned() } else { size::format(scratch_bytes) }
}

/// Whether there is a TPM, for people.
pub fn tpm_text(tpm: bool) -> String {
    if tpm { "2.0, swtpm" } else { "none" }.to_owned()
}

/// The advice for a machine whose firmware finds nothing to boot.
fn no_boot_advice(machine: &Machine) -> String {
    let install = if machine.secure_boot {
        "install a boot loader in the image that is signed with Microsoft's keys, such as Debian's shim-signed with \
         grub-efi-amd64-signed"
    } else {
        "install a boot loader for the firmware of the machine (UEFI or BIOS) in the image"
    };
    format!("{install}; {}", console_advice(&machine.name))
}

async fn wait_until_up(client: &Client, mut machine: Machine, limit: Duration) -> anyhow::Result<Machine> {
    // `None`: the deadline overflows, so there is none.
    let deadline = tokio::time::Instant::now().checked_add(limit);
    loop {
        match machine.state {
            MachineState::Running => return Ok(machine),
            _ if is_off(&machine) => {
                let problem = Problem::new(ProblemKind::Failed, sentence(&machine));
                return Err(problem.advise(console_advice(&machine.name)).into());
            }
            // The firmware found nothing to boot, so waiting is useless.
            MachineState::Booting if machine.reason.is_some() => {
                let problem = Problem::new(ProblemKind::Failed, sentence(&machine));
                return Err(problem.advise(no_boot_advice(&machine)).into());
            }
            _ if deadline.is_some_and(|deadline| tokio::time::Instant::now() >= deadline) => {
                let message =
                    format!("machine '{}' has not booted after {} s", machine.name, limit.as_secs());
                let problem = Problem::new(ProblemKind::Failed, message);
                return Err(problem.advise(console_advice(&machine.name)).into());
            }
            _ => {}
        }
        tokio::time::sleep(WAIT_INTERVAL).await;
        machine = client.machine(&machine.name).await?;
    }
}

async fn show_one(client: &Client, name: &str, json: bool) -> anyhow::Result<()> {
    let machine = client.machine(name).await?;
    if json {
        return show::json(&machine);
    }
    let or_dash = |text: Option<String>| text.unwrap_or_else(|| "-".to_owned());
    let mut pairs = vec![
        ("machine", machine.name.clone()),
        ("state", sentence(&machine)),
        ("image", machine.image.clone()),
        ("version", or_dash(machine.version.clone())),
        ("at its next boot", or_dash(machine.next_version.clone())),
        ("pinned to", or_dash(machine.pin.clone())),
        ("catalog", or_dash(machine.catalog.clone())),
        ("persistent disk over", or_dash(machine.kept.clone())),
        ("edits", or_dash(machine.edits.clone())),
        ("host", or_dash(show::machines::host(&machine))),
        ("uuid", machine.uuid.to_string()),
        ("host name", machine.identity.host_name.clone()),
    ];
    if machine.connection.is_some() {
        let cloud = machine.cloud.clone();
        pairs.extend([
            ("in Azure", or_dash(cloud.as_ref().map(ToString::to_string))),
            ("Azure's identifier", or_dash(cloud.map(|cloud| cloud.vm_id))),
        ]);
    } else {
        pairs.extend([
            ("mac", machine.mac.clone()),
            ("started by", started_by(&machine)),
            ("machine-id", machine.identity.machine_id.clone()),
            ("ssh host key", machine.identity.ssh_host_key_public.clone()),
            ("personality", personality::in_words(&machine.identity.personality)),
            ("memory", size::format(machine.memory_bytes)),
            ("processors", machine.cpus.to_string()),
            ("write cache", cache_text(&machine.cache)),
            ("disk reached by", machine.transport.to_string()),
        ]);
    }
    pairs.extend([
        ("created", show::time(machine.created_at_ms)),
        ("started", or_dash(machine.started_at_ms.map(show::time))),
    ]);
    if machine.connection.is_none() {
        pairs.extend([
            ("process", or_dash(machine.pid.map(|pid| pid.to_string()))),
            ("run by", or_dash(machine.accelerator.clone())),
        ]);
    }
    // A target and a machine in a cloud have hardware of their own.
    if machine.boot == BootFrom::Vm && machine.connection.is_none() {
        pairs.extend([
            ("firmware", firmware_text(machine.firmware, machine.secure_boot)),
            ("TPM", tpm_text(machine.tpm)),
            ("display", display_text(&machine)),
            ("network", network_text(&machine.network)),
            ("address", address_text(&machine)),
            ("scratch disk", scratch_text(machine.scratch_bytes)),
        ]);
    }
    if let Some(disk) = machine.disk {
        pairs.extend([
            ("reads", format!("{}, {}", disk.reads, size::format(disk.read_bytes))),
            ("writes", format!("{}, {}", disk.writes, size::format(disk.written_bytes))),
            ("read from image", size::format(disk.image_read_bytes)),
            ("RAM used", size::format(disk.ram_used_bytes)),
            ("disk used", size::format(disk.disk_used_bytes)),
            ("spilled", size::format(disk.spilled_bytes)),
            ("pauses", disk.pauses.to_string()),
            ("IOPS", disk.iops.to_string()),
        ]);
        if disk.to_copy_bytes > 0 {
            pairs.push(("image on this host", copied_text(&disk)));
        }
    }
    show::pairs(&pairs)?;
    show::latest_events(client.events(Some(&format!("machine {name}")), None, 10).await?)
}

#[cfg(test)]
mod tests {
    use serde_json::json;
    use tokio::io::{AsyncReadExt, AsyncWriteExt};
    use tokio::net::UnixListener;

    use super::*;

    fn machine(state: &str, wanted: &str) -> Machine {
        let machine = json!({
            "name": "lab", "uuid": "00112233-4455-4677-8899-aabbccddeeff", "mac": "52:54:00:01:02:03", "image": "i",
            "cache": CacheSettings::default(), "memory_bytes": 1, "cpus": 1, "wanted": wanted, "state": state,
            "created_at_ms": 0, "identity": {"host_name": "lab", "machine_id": "1", "ssh_host_key_public": "k"},
        });
        serde_json::from_value(machine).unwrap()
    }

    /// Waits for a machine whose states are these, one for each request.
    async fn wait(looks: Vec<Machine>, limit: Duration) -> anyhow::Result<Machine> {
        let dir = tempfile::tempdir().unwrap();
        let listener = UnixListener::bind(dir.path().join("api.sock")).unwrap();
        let client = Client::new(dir.path().join("api.sock"));
        let mut looks = looks.into_iter();
        let first = looks.next().unwrap();
        let daemon = async {
            for look in looks {
                let (mut stream, _) = listener.accept().await.unwrap();
                let mut request = [0; 4096];
                let _ = stream.read(&mut request).await.unwrap();
                let body = serde_json::to_string(&look).unwrap();
                let head = format!("HTTP/1.1 200 OK\r\ncontent-length: {}\r\n\r\n", body.len());
                stream.write_all(format!("{head}{body}").as_bytes()).await.unwrap();
            }
            std::future::pending().await
        };
        tokio::select! {
            outcome = wait_until_up(&client, first, limit) => outcome,
            () = daemon => unreachable!(),
        }
    }

    #[tokio::test]
    async fn a_guest_that_restarts_while_it_is_waited_for_comes_up() {
        let (booting, restarts) = (machine("booting", "running"), machine("stopped", "running"));
        let limit = Duration::from_secs(60);
        let up = wait(vec![booting.clone(), restarts, machine("running", "running")], limit).await.unwrap();
        assert_eq!(up.state, MachineState::Running);
        for (state, wanted) in [("stopped", "stopped"), ("crashed", "running"), ("lost", "running")] {
            let error = wait(vec![booting.clone(), machine(state, wanted)], limit).await.unwrap_err();
            assert!(error.to_string().starts_with(&format!("lab is {state}")), "{error}");
        }
    }

    #[tokio::test]
    async fn a_wait_ends_when_the_firmware_finds_nothing_to_boot() {
        let mut stuck = machine("booting", "running");
        stuck.reason = Some("its firmware finds nothing to boot: 'No bootable device'".to_owned());
        let error = wait(vec![stuck], Duration::from_secs(600)).await.unwrap_err();
        assert!(error.to_string().contains("No bootable device"), "{error}");
    }

    #[tokio::test]
    async fn a_wait_may_be_as_long_as_a_number_can_say() {
        let looks = vec![machine("booting", "running"), machine("running", "running")];
        let up = wait(looks, Duration::from_secs(u64::MAX)).await.unwrap();
        assert_eq!(up.state, MachineState::Running);
    }
}
