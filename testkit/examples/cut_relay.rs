//! `cut_relay TARGET`: a TCP relay to a server. Commands on its standard input cut, silence or restore it, for tests
//! of machines whose disk is on the network.
//!
//! It prints its address. Each command holds until the next one:
//!
//! | line | effect |
//! |---|---|
//! | `cut` | connections end, and new ones are closed at once |
//! | `silence` | existing and new connections stay open, and no data is passed on |
//! | `go` | all data is passed on, as at the beginning |

use std::io::{Read, Write};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

/// How long a silent direction waits before it checks again.
const TICK: Duration = Duration::from_millis(20);

#[derive(Clone, Copy, PartialEq, Eq)]
enum Line {
    Go,
    Silence,
    Cut,
}

struct State {
    line: Line,
    /// Both sides of all connections so far.
    sockets: Vec<TcpStream>,
}

type Shared = Arc<Mutex<State>>;

fn line(state: &Shared) -> Line {
    state.lock().unwrap_or_else(PoisonError::into_inner).line
}

fn set(state: &Shared, line: Line) {
    let mut state = state.lock().unwrap_or_else(PoisonError::into_inner);
    state.line = line;
    if line == Line::Cut {
        for socket in state.sockets.drain(..) {
            let _ = socket.shutdown(Shutdown::Both);
        }
    }
}

fn pass_on(mut from: TcpStream, mut to: TcpStream, state: &Shared) {
    let mut buffer = vec![0; 64 << 10];
    while let Ok(len @ 1..) = from.read(&mut buffer) {
        while line(state) == Line::Silence {
            std::thread::sleep(TICK);
        }
        if line(state) == Line::Cut || to.write_all(buffer.get(..len).unwrap_or_default()).is_err() {
            break;
        }
    }
    let _ = to.shutdown(Shutdown::Both);
    let _ = from.shutdown(Shutdown::Both);
}

fn connect(client: TcpStream, target: SocketAddr, state: &Shared) -> std::io::Result<()> {
    let server = TcpStream::connect(target)?;
    client.set_nodelay(true)?;
    server.set_nodelay(true)?;
    let both = [client.try_clone()?, server.try_clone()?];
    {
        let mut state = state.lock().unwrap_or_else(PoisonError::into_inner);
        // Cut since it was accepted.
        if state.line == Line::Cut {
            return Ok(());
        }
        state.sockets.extend(both);
    }
    let (from, to) = (client.try_clone()?, server.try_clone()?);
    let of_server = Arc::clone(state);
    std::thread::spawn(move || pass_on(server, client, &of_server));
    let of_client = Arc::clone(state);
    std::thread::spawn(move || pass_on(from, to, &of_client));
    Ok(())
}

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let target = std::env::args().nth(1).ok_or("usage: cut_relay HOST:PORT")?.parse()?;
    let listener = TcpListener::bind("127.0.0.1:0")?;
    println!("{}", listener.local_addr()?);
    let state = Arc::new(Mutex::new(State { line: Line::Go, sockets: Vec::new() }));
    let accepting = Arc::clone(&state);
    std::thread::spawn(move || {
        for client in listener.incoming().flatten() {
            if line(&accepting) != Line::Cut {
                // If the server does not answer, the connection ends.
                let _ = connect(client, target, &accepting);
            }
        }
    });
    for told in std::io::stdin().lines() {
        match told?.as_str() {
            "go" => set(&state, Line::Go),
            "silence" => set(&state, Line::Silence),
            "cut" => set(&state, Line::Cut),
            other => return Err(format!("'{other}' is none of go, silence and cut").into()),
        }
    }
    Ok(())
}
