# The text of a Homebrew formula, for a tap. A release fills in the lines marked with RELEASE.
#
# MLX comes as wheels for each version of Python, so pip installs into a virtual environment here,
# and no resource blocks are needed. The user's settings stay in config.toml: brew writes the job
# anew with each upgrade.
class Mlxsup < Formula
  include Language::Python::Virtualenv

  desc "Process supervisor for MLX language models"
  homepage "https://example.org/mlxsup" # RELEASE
  url "https://example.org/mlxsup-0.1.0.tar.gz" # RELEASE
  sha256 "0000000000000000000000000000000000000000000000000000000000000000" # RELEASE
  license "Apache-2.0"

  depends_on arch: :arm64
  depends_on :macos
  depends_on "python@3.13"

  def install
    virtualenv_create(libexec, "python3.13", without_pip: false)
    system libexec/"bin/python", "-m", "pip", "install", "#{buildpath}[gateway]"
    bin.install_symlink libexec/"bin/mlxsup"
    generate_completions_from_executable(bin/"mlxsup", "completion", shells: [:bash, :zsh, :fish])
  end

  service do
    run [opt_bin/"mlxsup", "start", "--service"]
    keep_alive successful_exit: false
    process_type :interactive
    environment_variables PATH: std_service_path_env
    log_path var/"log/mlxsup.log"
    error_log_path var/"log/mlxsup.log"
  end

  def caveats
    <<~EOS
      The service reads ~/.mlxsup/config.toml, which `mlxsup init` writes.
      Use either `brew services` or `mlxsup service`, not both.
    EOS
  end

  test do
    assert_match "mlxsup", shell_output("#{bin}/mlxsup --version")
    assert_match "no configuration file", shell_output("#{bin}/mlxsup start --config x.toml 2>&1", 78)
  end
end
